"""The codes of all that zckpt says: what each means, how it comes about, and what to do.

A code never changes its meaning. It stands for what the user does next, so that several sentences
share one. `docs/codes.md` is generated from this table.

Over 600 lines: one table, in which each code stands beside those that it could be taken for.
"""

from __future__ import annotations

from msgspec import Struct

OPTION = (2, 2)
FAULT = (3, 1)
REFUSAL = (1, 1)
"""Exit codes of commands that look, and of those that write: of wrong options, of what files say of
themselves, and of what cannot be done."""


class Code(Struct, frozen=True):
    """One code; `exits` are those of its errors, of each kind one. Without, nothing ends with it.

    A warning or a note with this code changes no exit code.
    """

    exits: tuple[tuple[int, int], ...]
    meaning: str
    origin: str
    action: str


TOPICS: dict[str, dict[str, Code]] = {
    "Damaged and missing files": {
        "elements-missing": Code(
            (FAULT,),
            "The files hold only a part of a tensor.",
            "A rank's file is missing, or the save did not finish.",
            "Copy all files of the save again, or use an earlier checkpoint.",
        ),
        "elements-overlap": Code(
            (FAULT,),
            "Two places of the files claim the same elements or bytes.",
            "Files of two saves are mixed, or the metadata is damaged.",
            "Copy all files of one save again.",
        ),
        "file-copied-over": Code(
            (FAULT,),
            "Two files that should differ hold the same bytes.",
            "One was copied over the other.",
            "Copy all files again.",
        ),
        "file-cut-short": Code(
            (FAULT,),
            "A file ends before its last tensor does.",
            "A copy or a save was interrupted, or a disk was full.",
            "Take another copy of this file, or an earlier checkpoint.",
        ),
        "file-damaged": Code(
            (FAULT,),
            "A file contradicts itself, or holds what no writer writes.",
            "Bytes have changed, or the file was edited.",
            "Take another copy of this file, or an earlier checkpoint.",
        ),
        "file-not-understood": Code(
            (FAULT,),
            "A file cannot be read: it is damaged, or of a layout that zckpt does not know.",
            "Bytes have changed, or a newer version of the engine wrote it.",
            "Try another copy. If it fails too, compare the versions of `zckpt formats`.",
        ),
        "file-too-large": Code(
            (REFUSAL,),
            "A header, a pickle or a manifest is larger than zckpt reads.",
            "The file holds large values beside tensors, or it is hostile.",
            "Save large values as tensors.",
        ),
        "lfs-pointer": Code(
            (FAULT,),
            "A file is a pointer of Git LFS instead of a checkpoint.",
            "The repository was cloned without its large files.",
            "Run `git lfs pull`.",
        ),
        "consent-needed": Code(
            (FAULT,),
            "One flipped bit explains a checksum, but damage of many bits could look like it.",
            "The record is large, or a block of one repeated value in it looks like a lost sector.",
            "Give an older checkpoint with `--older PATH`, or type `--accept-chance`.",
        ),
        "mended": Code(
            (),
            "A part of the checkpoint was damaged, and `zckpt mend` has restored it.",
            "A bit was flipped on a disk, in memory or on the way, or a file was lost.",
            "Nothing, if it was restored exactly. Else know that a value may be another one.",
        ),
        "not-mendable": Code(
            (FAULT,),
            "Bytes are damaged, and nothing says what was there before.",
            "Several bits were changed, or a file was cut short or lost.",
            "Take another copy of the file, or an older checkpoint.",
        ),
        "nothing-to-mend": Code(
            (REFUSAL,),
            "No damage was found, so there is nothing to mend.",
            "The checkpoint is intact, or its files have no checksums.",
            "Copy or convert it.",
        ),
        "missing-file": Code(
            (FAULT,),
            "A file that the engine writes once is missing.",
            "It was not copied, was deleted, or the save did not finish.",
            "Copy it from where the other files are, or use an earlier checkpoint.",
        ),
        "missing-rank-file": Code(
            (FAULT,),
            "The file of a rank is missing.",
            "A node's disk was not copied, or the save did not finish.",
            "Copy the file of the rank that the message names.",
        ),
        "record-damaged": Code(
            (FAULT,),
            "Bytes do not have the checksum that their file states.",
            "A bit was flipped on a disk, in memory or on the way.",
            "Take another copy of this file, or an earlier checkpoint.",
        ),
        "source-changed": Code(
            (REFUSAL,),
            "A file changed or was removed while it was read.",
            "Another program writes or deletes there.",
            "Stop that program, or copy the checkpoint; then start again.",
        ),
        "trainer-file-damaged": Code(
            (FAULT,),
            "A file of the trainer beside the checkpoint is missing or damaged.",
            "The save did not finish, or bytes have changed.",
            "Take another copy of it, or an earlier checkpoint.",
        ),
        "unfinished-save": Code(
            (FAULT, REFUSAL),
            "The file that the engine writes last is missing, or a file is empty.",
            "The job ended while it saved.",
            "Use an earlier checkpoint.",
        ),
        "unread-file-damaged": Code(
            (),
            "A file beside the checkpoint is damaged, and resuming does not read it.",
            "Bytes have changed, or a copy was interrupted.",
            "Take another copy of it, if you need it; the run goes on without.",
        ),
        "links-out": Code(
            (),
            "Files of the checkpoint are links that lead out of its folder.",
            "Caches of data are made of links: the Hub's, DVC, git-annex, `cp -rs`.",
            "Nothing, if they should lie there. `--follow-links` takes a trainer's files too.",
        ),
        "unsafe-name": Code(
            (FAULT, REFUSAL),
            "A name or a link leads out of its folder.",
            "Caches are made of links; else the checkpoint is damaged or hostile.",
            "Put a file in place of a link, or take another copy; do not trust this one.",
        ),
    },
    "Files of one save": {
        "copies-differ": Code(
            (FAULT,),
            "Ranks hold different values of a tensor that all should have alike.",
            "Files of two saves are mixed, or copies drifted in training.",
            "Copy all files of one save again. For copies that drifted, see `--replicas`.",
        ),
        "files-of-other-time": Code(
            (),
            "Files of ranks were written long before or after the others.",
            "They may be of another save; a copy may also have changed the times.",
            "Compare the sizes and times with the place where they were saved.",
        ),
        "master-differs": Code(
            (FAULT,),
            "A weight is not its rounded fp32 master.",
            "Files of two saves or ranks are mixed, or the program saved other weights.",
            "Copy all files of one save again. If it is meant, add `--accept-weights`.",
        ),
        "mixed-saves": Code(
            (FAULT, REFUSAL),
            "Files contradict each other as those of different saves or runs do.",
            "Files of two saves lie in one directory.",
            "Keep the files of one save alone.",
        ),
        "partition-does-not-fit": Code(
            (FAULT,),
            "Ranks hold other numbers of elements than the engine's partition gives them.",
            "Files of different runs, saves or numbers of ranks are mixed.",
            "Copy all files of one save again.",
        ),
        "ranks-disagree": Code(
            (FAULT, REFUSAL),
            "Ranks or files state different facts or shapes of the same thing.",
            "Files of different saves or models are mixed.",
            "Copy all files of one save again.",
        ),
        "rank-slices": Code(
            (FAULT,),
            "Files of ranks hold slices of tensors, and do not say so.",
            "The program saved each rank's plain local tensors.",
            "Save with torch.distributed.checkpoint, or gather the tensors first.",
        ),
        "saved-name-unknown": Code(
            (),
            "Files do not state the name under which they were saved.",
            "Old versions of torch, or of zckpt, wrote no names.",
            "Nothing. If files may have been swapped, compare with another copy.",
        ),
        "steps-disagree": Code(
            (FAULT,),
            "Files state different steps of the optimizer, or of the trainer and its engine.",
            "Files of two saves are mixed.",
            "Copy all files of one save again, or choose with `--step-policy`.",
        ),
        "swapped-files": Code(
            (FAULT,),
            "A file states that it belongs to another rank or place.",
            "Two files were swapped or renamed.",
            "Copy all files again under their own names.",
        ),
        "world-size-disagrees": Code(
            (FAULT,),
            "Files state another number of ranks than there are files.",
            "Files of two runs are mixed, or some are missing.",
            "Copy all files of one save again.",
        ),
    },
    "Which checkpoint": {
        "no-checkpoint": Code(
            (REFUSAL,),
            "A run holds no checkpoint, or does not exist yet.",
            "It has not saved yet, or the path is another one.",
            "Check the path, if the run should have saved.",
        ),
        "no-such-path": Code(
            (REFUSAL,),
            "The path does not exist, or is of another kind.",
            "It is misspelled, or not mounted.",
            "Check the path.",
        ),
        "not-a-checkpoint": Code(
            (REFUSAL,),
            "No format recognizes the path.",
            "It is another folder or file than the training saved.",
            "Give the directory that the training program saved.",
        ),
        "other-folder-needed": Code(
            (REFUSAL,),
            "This folder or file has only the model, or only the optimizer.",
            "The program saves the two apart.",
            "Give the path that holds both.",
        ),
        "pointer-dangling": Code(
            (FAULT, REFUSAL),
            "The file that names the checkpoint names one that is not there.",
            "The checkpoint was removed or renamed, or the file was cut short.",
            "Choose one with `--tag`.",
        ),
        "several-checkpoints": Code(
            (REFUSAL,),
            "The path holds several checkpoints, and nothing says which is meant.",
            "A run's directory was given.",
            "Give the path of one of them.",
        ),
        "several-formats": Code(
            (REFUSAL,),
            "The path holds checkpoints of several formats.",
            "Two programs saved in one directory.",
            "Choose one with `--from`.",
        ),
        "several-models": Code(
            (OPTION, REFUSAL),
            "The checkpoint has several models or optimizers.",
            "The program saved them together.",
            "Choose one with `--root`.",
        ),
        "several-tags": Code(
            (REFUSAL,),
            "The path holds several tags, and no file says which is meant.",
            "The file `latest` is missing.",
            "Choose one with `--tag`.",
        ),
        "unfinished-target": Code(
            (FAULT,),
            "The path is a target of zckpt that is not complete.",
            "A run of zckpt still writes it, or was stopped.",
            "Wait for that run, or repeat it with `--resume`.",
        ),
    },
    "What zckpt does not read": {
        "grid-unsupported": Code(
            (REFUSAL,),
            "The run shared its model among ranks in a way that zckpt does not read.",
            "It combines parallel axes that are not known together.",
            "Save with other sizes, or see what `docs/limits.md` lists.",
        ),
        "layout-unknown": Code(
            (FAULT, REFUSAL),
            "The files do not show which tensor is where.",
            "The engine's files leave out the order or the names.",
            "Take a checkpoint that states them, as the hint says.",
        ),
        "optimizer-unsupported": Code(
            (OPTION, REFUSAL),
            "The optimizer is not known to zckpt or to the target.",
            "Its states have a form that only its program understands.",
            "Convert with another `--optimizer`, or the weights alone.",
        ),
        "proof-unsupported": Code(
            (REFUSAL,),
            "This comparison cannot be made of these files.",
            "The engine's rule, or a proof, does not say enough.",
            "Verify without `--gather`, or compare with the checkpoint itself.",
        ),
        "state-unsupported": Code(
            (REFUSAL,),
            "A state of the optimizer has no place in the target, or cannot be read.",
            "It is of one rank, of one size, or of a class.",
            "Choose a target that keeps it, or give it up with `--drop-state`.",
        ),
        "storage-unsupported": Code(
            (REFUSAL,),
            "A tensor is stored in a way that zckpt does not read.",
            "It is compressed, chunked, not contiguous or big-endian.",
            "Save or rewrite it plainly, as the hint says.",
        ),
        "type-unsupported": Code(
            (FAULT, REFUSAL),
            "This type is not read or converted.",
            "A tensor or value has a class or type of its own.",
            "Cast it before saving, or leave it out.",
        ),
        "version-unsupported": Code(
            (REFUSAL,),
            "The files are of a version that zckpt does not read.",
            "They are very old, or newer than this zckpt.",
            "Install a newer zckpt, or save with another version.",
        ),
        "writer-unsupported": Code(
            (REFUSAL,),
            "The checkpoint was saved in a form that zckpt does not read.",
            "An option or an extension of the engine writes files of its own.",
            "Save without it, as the hint says.",
        ),
    },
    "What the source lacks": {
        "model-config-wrong": Code(
            (REFUSAL,),
            "The configuration (config.json) is missing, or does not describe this model.",
            "The trainer did not save it, or it is of another model.",
            "Give the model's own with `--config`.",
        ),
        "cuts-unknown": Code(
            (REFUSAL,),
            "Nothing says how tensor ranks cut the parameters.",
            "The engine does not store it.",
            "Give rules with `--tp-rules`, or a run with `--like`.",
        ),
        "groups-missing": Code(
            (REFUSAL,),
            "The source has no parameter groups, which the target needs.",
            "Its files do not store them.",
            "Take a checkpoint with its optimizer, or write the weights alone.",
        ),
        "hyperparameter-missing": Code(
            (REFUSAL,),
            "The source does not state a hyper-parameter that the target needs.",
            "Its optimizer has no such one, or the files do not store it.",
            "Give it with `--group-defaults`.",
        ),
        "masters-missing": Code(
            (),
            "The source has no fp32 masters: the target gets its weights, widened.",
            "The program trained without them, or saved only weights.",
            "Nothing, if the weights are of the type that was trained.",
        ),
        "names-needed": Code(
            (REFUSAL,),
            "The optimizer knows its parameters by number, and nothing shows their names.",
            "Shapes or bytes fit several parameters, or none.",
            "Give the names with `--param-names`.",
        ),
        "never-updated": Code(
            (),
            "The optimizer lists a parameter that it never updated.",
            "It got no gradient, or its state is lost.",
            "If the program does not train it, name it with `--frozen`.",
        ),
        "one-value-needed": Code(
            (FAULT,),
            "The target has one value for what differs among parameters of the source.",
            "Parameters have different steps or numbers in one group.",
            "Choose one with `--step-policy`, or a target that keeps them apart.",
        ),
        "optimizer-missing": Code(
            (FAULT, REFUSAL),
            "The source has no optimizer state, or nothing that is trained.",
            "It was saved without one, another file has it, or its files are lost, damaged or of a "
            "kind that is not read.",
            "Write the weights alone: `--weights-only`.",
        ),
        "state-missing": Code(
            (FAULT, REFUSAL),
            "A parameter lacks a state that others of its group have.",
            "It was lost, or never made.",
            "Take another checkpoint, or a target that needs no such state.",
        ),
        "step-missing": Code(
            (REFUSAL,),
            "The source does not state its step.",
            "Its files do not store it.",
            "Give it with `--step-policy N`.",
        ),
        "weights-missing": Code(
            (FAULT, REFUSAL),
            "Weights are not in the files.",
            "They were left out of the save, or are in another file.",
            "Take a checkpoint that has them.",
        ),
    },
    "Targets": {
        "name-unsupported": Code(
            (REFUSAL,),
            "The target cannot have a tensor or key of this name.",
            "Its files or folders limit names.",
            "Choose another format, or rename it.",
        ),
        "not-enough-space": Code(
            (REFUSAL,),
            "The filesystem has too little space, or limits the size.",
            "The target is about as large as the source.",
            "Free some space, or choose another filesystem.",
        ),
        "nowhere-to-write": Code(
            (REFUSAL,),
            "Nothing can be written where the resharded checkpoint would be.",
            "The run's directory is read-only, or full.",
            "Name a folder with `--scratch`.",
        ),
        "output-not-writable": Code(
            (OPTION,),
            "The file for a report cannot be written.",
            "Its folder is missing or read-only, or something else is there.",
            "Name another file.",
        ),
        "target-being-written": Code(
            (REFUSAL,),
            "Another run of zckpt is writing this target now.",
            "Two jobs were started for one target.",
            "Wait for that run, or choose another target.",
        ),
        "target-exists": Code(
            (REFUSAL,),
            "The target exists; zckpt never overwrites one.",
            "An earlier command, or another program, wrote it.",
            "Choose another name, or remove it.",
        ),
        "target-in-source": Code(
            (OPTION,),
            "The target is the source, or lies inside of it.",
            "Both paths name one place.",
            "Choose a target beside the source.",
        ),
        "target-not-resumable": Code(
            (REFUSAL,),
            "The unfinished target is of another source, option or version.",
            "Something has changed since it was begun.",
            "Use what was used before, or remove it.",
        ),
        "target-unfinished": Code(
            (REFUSAL,),
            "A run was stopped while it wrote this target.",
            "A signal, a crash or a power loss ended it.",
            "Add `--resume`, or remove it.",
        ),
        "target-unsafe": Code(
            (REFUSAL,),
            "Something in the target's folder is not what zckpt created for you.",
            "It is a link, a pipe, or another user's.",
            "Choose another target, or remove it.",
        ),
        "target-unsupported": Code(
            (OPTION, FAULT, REFUSAL),
            "This source is not written in this form.",
            "The target's engine has no place for it, or no such files are known.",
            "Choose another format or size, as the hint says.",
        ),
        "value-out-of-range": Code(
            (REFUSAL,),
            "Numbers are larger than the chosen type can hold.",
            "The type is narrow: fp16 ends at 65,504.",
            "Choose a type with a larger range: `--dtype bf16`.",
        ),
    },
    "Options": {
        "ds-config-wrong": Code(
            (OPTION,),
            "The ds_config cannot be used, or contradicts the options or the source.",
            "It is of another run, is no JSON, or sets what zckpt does not write.",
            "Correct it.",
        ),
        "family-does-not-fit": Code(
            (OPTION, REFUSAL),
            "The rules of `--family` do not fit the source.",
            "It is of another family, or has other sizes.",
            "Choose another family, or state its sizes.",
        ),
        "like-does-not-fit": Code(
            (OPTION, FAULT, REFUSAL),
            "The run of `--like` or `--groups-from` is not one of this model or program.",
            "It has other parameters, shapes, states or files, or no groups of an optimizer.",
            "Give a run of the same model that the next program has saved.",
        ),
        "names-collide": Code(
            (OPTION, FAULT),
            "Two tensors would get one name.",
            "A rule renames both, or they differ in wrappers alone.",
            "Change the rule, or rename one with `--rename`.",
        ),
        "names-do-not-fit": Code(
            (OPTION, REFUSAL),
            "The given names are not those of the checkpoint.",
            "The list has other names, another order or another number.",
            "Correct the list; the hint says in which order.",
        ),
        "option-invalid": Code(
            (OPTION, FAULT),
            "An option has a value that it cannot have.",
            "It is misspelled, or out of range.",
            "See `--help` for its values.",
        ),
        "option-names-nothing": Code(
            (OPTION,),
            "An option names what the checkpoint does not have.",
            "It is misspelled, or is meant for another checkpoint.",
            "Choose one of the names in the hint.",
        ),
        "option-needed": Code(
            (OPTION, REFUSAL),
            "The command needs a further option.",
            "Nothing else says what is meant.",
            "Add the option that the hint names.",
        ),
        "option-not-applicable": Code(
            (OPTION, REFUSAL),
            "An option does not apply to this source or target.",
            "It belongs to another format.",
            "Leave it out.",
        ),
        "option-without-effect": Code(
            (),
            "An option changes nothing here.",
            "The files state what it would say, or nothing that is written depends on it.",
            "Leave it out.",
        ),
        "options-conflict": Code(
            (OPTION, FAULT),
            "Options exclude each other.",
            "Each asks for something else.",
            "Leave one of them out.",
        ),
        "sizes-do-not-fit": Code(
            (OPTION, REFUSAL),
            "The sizes of the parallel axes do not divide what they cut.",
            "Ranks, heads, rows or experts cannot be shared evenly.",
            "Choose other sizes.",
        ),
        "stages-do-not-fit": Code(
            (OPTION,),
            "The bounds of the pipeline's stages do not fit the model.",
            "They leave out layers, or leave a stage without parameters.",
            "Give other bounds with `--pp-bounds`.",
        ),
        "tp-rule-wrong": Code(
            (OPTION, FAULT, REFUSAL),
            "A rule of tensor parallelism does not fit the ranks' tensors.",
            "The rule is for another model, or files of two runs are mixed.",
            "Correct it with `--tp-rules`.",
        ),
        "usage-error": Code(
            (OPTION,),
            "The command line is not understood.",
            "An option or an argument is misspelled or missing.",
            "See `zckpt COMMAND --help`.",
        ),
    },
    "Machine, processes and stores": {
        "disk-failed": Code(
            (REFUSAL,),
            "The disk or the network filesystem failed.",
            "Hardware, or a mount that is gone.",
            "See `dmesg`, mount it again, or take another copy.",
        ),
        "extra-missing": Code(
            (REFUSAL,),
            "A package that this command needs is not installed, or is too old.",
            "Only an extra installs it.",
            "Run the pip command of the hint.",
        ),
        "internal-error": Code(
            (REFUSAL,),
            "There is a bug in zckpt, or in a reader that was added to it.",
            "Nobody has met this case before.",
            "Report it, with what `ZCKPT_TRACEBACK=1` shows.",
        ),
        "interrupted": Code(
            (REFUSAL,),
            "A signal stopped the command; its exit code is 128 and the signal's number.",
            "Ctrl-C, or the end of a job's time.",
            "Repeat it, with `--resume` if the hint says so.",
        ),
        "launcher-variables": Code(
            (OPTION, REFUSAL),
            "The processes cannot meet.",
            "A launcher's variables are missing or contradict each other, or the port is taken.",
            "Use torchrun, set another MASTER_PORT, or add `--single`.",
        ),
        "nothing-to-clean": Code(
            (OPTION, REFUSAL),
            "There are no remains of a run of zckpt.",
            "The target is complete, or was never begun.",
            "Give the target of the stopped run.",
        ),
        "out-of-memory": Code(
            (REFUSAL,),
            "Too little memory is free.",
            "Other programs use it, or `-j` and `--memory` are high.",
            "Use a lower `-j` or `--memory`.",
        ),
        "permission-denied": Code(
            (REFUSAL,),
            "You may not read or write there.",
            "The files belong to another user, or the filesystem is read-only.",
            "Check the permissions: `namei -l PATH` lists them.",
        ),
        "process-failed": Code(
            (REFUSAL,),
            "Another process of this command failed.",
            "Its own message says why.",
            "See the message of that process.",
        ),
        "process-lost": Code(
            (REFUSAL,),
            "Another process of this command is gone.",
            "It was killed, or its node failed.",
            "End all processes, and repeat the command with `--resume`.",
        ),
        "processes-disagree": Code(
            (OPTION, REFUSAL),
            "The processes were not started for the same command.",
            "Their arguments, folders or versions differ.",
            "Start all with the same arguments and version.",
        ),
        "remains-of-runs": Code(
            (),
            "Unfinished directories of other runs are there, or were removed.",
            "Their jobs ended before they were complete.",
            "If no job is writing there, remove what the sentence names.",
        ),
        "shared-files-differ": Code(
            (REFUSAL,),
            "A process does not see what another one wrote.",
            "The nodes do not share this filesystem.",
            "Check the mounts of both nodes.",
        ),
        "store-refused": Code(
            (REFUSAL,),
            "The object store refused a request, or did not answer.",
            "Credentials, region, clock or network.",
            "Do what the hint says; then start again with `--resume`.",
        ),
        "store-unsupported": Code(
            (OPTION, REFUSAL),
            "This store cannot be used for that.",
            "It gives no ranges of bytes, or takes no files.",
            "Copy the checkpoint to a filesystem first.",
        ),
        "system-error": Code(
            (REFUSAL,),
            "The operating system refused a request.",
            "The message has its own words.",
            "Check the path, and whether you may read or write it.",
        ),
        "too-many-open-files": Code(
            (REFUSAL,),
            "A process or the machine has too many open files.",
            "The limit is low, or `-j` is high.",
            "Raise it (`ulimit -n`), or use a lower `-j`.",
        ),
        "store-without-condition": Code(
            (),
            "The store takes no condition, so that two writers could meet.",
            "It does not know `If-None-Match`.",
            "Let no other program write there at the same time.",
        ),
        "upload-damaged": Code(
            (FAULT,),
            "A file did not arrive in the store as it was sent.",
            "The network or the store changed it.",
            "Start again with `--resume`.",
        ),
    },
    "Resuming": {
        "batch-size-changes": Code(
            (),
            "Another number of ranks changes the global batch.",
            "The batch of a rank stays, and their number does not.",
            "Set the batch size of a rank as the sentence says.",
        ),
        "checkpoint-set-aside": Code(
            (),
            "A newer checkpoint is not taken.",
            "It is not whole, or is damaged.",
            "Look at it with `zckpt verify`; the run goes on from an older one.",
        ),
        "format-differs": Code(
            (FAULT,),
            "The engine does not load this format, or not from this place.",
            "Another engine saved it, or it is in an object store.",
            "Run the command that the report proposes.",
        ),
        "none-is-whole": Code(
            (FAULT,),
            "The run has checkpoints, and none is whole.",
            "All are damaged, or their files are missing.",
            "See what `zckpt verify PATH` says of each; to start anew, choose another directory.",
        ),
        "parameters-differ": Code(
            (FAULT,),
            "The checkpoint has other parameters or shapes than the program.",
            "It is of another model.",
            "Give the checkpoint of this model, or rename its parameters.",
        ),
        "pointer-behind": Code(
            (),
            "The run names an older checkpoint as its last one.",
            "The newest save has not ended, or the run was set back.",
            "Nothing: the named one is taken.",
        ),
        "groups-differ": Code(
            (FAULT,),
            "The program's optimizer has other groups, or trains other parameters.",
            "Its rule for weight decay has changed, or it freezes others.",
            "Take its groups: `zckpt reshard --groups-from RUN`, where RUN is a save of the "
            "program.",
        ),
        "program-does-not-fit": Code(
            (FAULT, REFUSAL),
            "The program asks for what the checkpoint does not hold in this form.",
            "Its names, groups, scheduler or types are others.",
            "Give the program the groups or the scheduler of the checkpoint; rename; or give "
            "StorageReader the model and the optimizer.",
        ),
        "program-must-set": Code(
            (FAULT,),
            "The program that loads the target must do or set something.",
            "The files of its engine cannot say it.",
            "Do what the sentence says before training goes on.",
        ),
        "scheduler-differs": Code(
            (FAULT,),
            "The scheduler of the next run loads a state that the checkpoint does not have.",
            "Its ds_config names a scheduler that the program did not have.",
            "Run the command that the report proposes, or `zckpt auto-resume`.",
        ),
        "size-differs": Code(
            (FAULT,),
            "The engine loads this checkpoint at another size or stage alone.",
            "It was saved by another number of ranks.",
            "Run the command that the report proposes, or `zckpt auto-resume`.",
        ),
    },
    "What looking finds": {
        "bytes-unknown": Code(
            (FAULT,),
            "A file has bytes that nothing in it describes.",
            "An entry was lost, or the file is of another save.",
            "Compare with another copy.",
        ),
        "checksum-missing": Code(
            (),
            "Parts of files have no checksum, so that damage in them may go unseen.",
            "They were saved with checksums switched off, or by an engine without them.",
            "Compare with another copy; a universal checkpoint has checksums.",
        ),
        "moment-impossible": Code(
            (),
            "A moment has values that its optimizer never gives it.",
            "Bytes have changed, or the state is of something else.",
            "Compare with an earlier checkpoint.",
        ),
        "step-doubtful": Code(
            (),
            "The step may not be the true number of updates.",
            "The run was saved before its first update, or its type cannot count further.",
            "Look whether it is the one that you expect; keep steps in fp32.",
        ),
        "not-finite": Code(
            (),
            "A tensor has NaN or infinities.",
            "The training has diverged, or a type was too narrow.",
            "Go on from an earlier checkpoint.",
        ),
        "not-compared": Code(
            (),
            "Something was not compared, so that nothing is known of it.",
            "One side has no place for it, or it was left out by an option.",
            "Read what it is; compare it by hand if it matters.",
        ),
        "nothing-to-compare": Code(
            (OPTION, REFUSAL),
            "The two sides share nothing that can be compared.",
            "They are of different models, or their names differ.",
            "Give the other side, or `--rename`.",
        ),
        "padding-differs": Code(
            (),
            "Bytes between tensors differ from what is usual; no tensor lies there.",
            "Padding is not cleared by the engine, or bits were flipped in it.",
            "Nothing.",
        ),
        "rank-zero-taken": Code(
            (),
            "Ranks hold different values by nature, and those of rank 0 are taken.",
            "Statistics or states are not synchronised.",
            "Nothing, if the training does not synchronise them.",
        ),
        "tensor-differs": Code(
            (FAULT,),
            "A tensor differs in value, type or shape.",
            "The two are of different steps or runs, or one is damaged.",
            "Look at the first elements that differ.",
        ),
        "tensor-missing": Code(
            (FAULT,),
            "One side lacks a tensor that the other one has.",
            "It was dropped, or is of another model.",
            "Look whether the target needs it.",
        ),
        "too-small": Code(
            (),
            "A tensor has numbers that are too small to be normal ones of its type.",
            "The type is narrow for these values.",
            "Nothing, or a type with a larger range.",
        ),
        "form-differs": Code(
            (),
            "Both sides say the same in another form: another type, or another place of the step.",
            "Two engines keep it differently.",
            "Nothing.",
        ),
        "unproven": Code(
            (FAULT,),
            "Equality rests on a guess that both sides share.",
            "Names were inferred in both.",
            "Name the parameters with `--param-names`.",
        ),
        "values-constant": Code(
            (),
            "All elements of a tensor are equal.",
            "No gradient has reached the parameter, or it was never initialised.",
            "Look whether the program uses it.",
        ),
    },
    "What was inferred or assumed": {
        "frozen-inferred": Code(
            (),
            "Parameters are taken for frozen ones or buffers.",
            "No optimizer lists them.",
            "If they were trained, their states are lost; see the sentence.",
        ),
        "value-assumed": Code(
            (),
            "A value is the optimizer's default, or that of the run of `--like` or "
            "`--groups-from`.",
            "The source does not store it.",
            "Check it, or give it with `--group-defaults`.",
        ),
        "names-inferred": Code(
            (),
            "Names of parameters were inferred from their order, shapes or bytes.",
            "The files know them by number.",
            "If it matters, give them with `--param-names`.",
        ),
        "place-inferred": Code(
            (),
            "The place of a layer or tensor was inferred.",
            "No file states it.",
            "Check it, as the sentence says.",
        ),
        "root-inferred": Code(
            (),
            "An optimizer was matched with a model by its name.",
            "The files do not show whose it is.",
            "If it is another one, say so with `--root`.",
        ),
        "tie-inferred": Code(
            (),
            "Two equal weights are taken for one, or the output layer may be tied.",
            "The files do not state ties.",
            "If they are not tied, or are, say so with `--tie`.",
        ),
    },
    "What a target gets": {
        "begins-afresh": Code(
            (),
            "The optimizer begins parameters that the source did not train.",
            "The run of `--groups-from` trains them.",
            "Nothing.",
        ),
        "begins-late": Code(
            (),
            "Parameters that the source did not train begin with zero moments at a late step.",
            "The run of `--groups-from` trains them, and the target keeps one step for a group.",
            "Give them a group of their own, which begins at its first update; or a lower rate.",
        ),
        "best-elsewhere": Code(
            (),
            "The best checkpoint is another one, which is not written.",
            "The Trainer's state names it.",
            "Convert it too: `--checkpoints best-and-last`.",
        ),
        "engine-fault": Code(
            (FAULT, REFUSAL),
            "The engine that wrote or will load the files has a known fault.",
            "Its version, or an option, shows it.",
            "Do what the sentence says; `docs/limits.md` lists more.",
        ),
        "file-omitted": Code(
            (),
            "A file beside the checkpoint is not copied.",
            "The target has its own, or has no use for it.",
            "Copy it by hand if it matters.",
        ),
        "loss-scale-low": Code(
            (),
            "The dynamic loss scale is at its minimum.",
            "Gradients have overflowed often.",
            "Resume from an earlier checkpoint if they still do.",
        ),
        "moments-lost": Code(
            (),
            "Moments of the target are zeros, or older than the weights.",
            "Those of the source are lost.",
            "Nothing; the next updates differ from those of the run.",
        ),
        "name-changed": Code(
            (),
            "Names have lost what wrappers or an attribute of the program put into them.",
            "The target's loader, or the comparison, asks for names without it.",
            "Nothing. `--rename` gives other names.",
        ),
        "name-omitted": Code(
            (),
            "A second name of a weight is not in the target.",
            "Its files store each weight once.",
            "Tie the weights in the program.",
        ),
        "not-exact": Code(
            (),
            "The target is exact in state, and its training is not exactly the same.",
            "The optimizer computes with ranks' parts, or by another rule.",
            "Nothing.",
        ),
        "rank-state-omitted": Code(
            (),
            "A state of single ranks is not in the target.",
            "It has no meaning at another number of ranks.",
            "Nothing; random numbers will be others.",
        ),
        "size-kept": Code(
            (),
            "No size was given: the target has the source's.",
            "No `--dp` was given.",
            "Add `--dp N` for another one.",
        ),
        "state-dropped": Code(
            (),
            "A state was given up.",
            "The option `--drop-state` names it, or the run of `--groups-from` does not train it.",
            "Nothing, if the optimizer can begin without it.",
        ),
        "state-omitted": Code(
            (),
            "Something of the source is not in the target.",
            "The target has no place for it, or has no use for it.",
            "Nothing, or set it in the program that resumes.",
        ),
        "target-not-synced": Code(
            (),
            "The target is complete, but a last step of its run failed.",
            "The filesystem did not sync or remove something.",
            "Run the command in the sentence.",
        ),
        "weights-differ-by-design": Code(
            (),
            "Weights are not their rounded masters, and both are kept.",
            "The engine changes them after each update.",
            "Nothing.",
        ),
        "weights-omitted": Code(
            (),
            "Weights beside the model are not in the target.",
            "They are averages, or the model of something else.",
            "Choose them with `--root`, as the sentence says.",
        ),
    },
    "Others": {
        "said-by-source": Code(
            (),
            "A sentence that an older zckpt wrote into the checkpoint, without a code.",
            "The manifest is of a version before there were codes.",
            "Read the sentence.",
        ),
    },
}

CODES = {code: row for codes in TOPICS.values() for code, row in codes.items()}
