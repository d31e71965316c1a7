"""The table of the codes of all errors, warnings and notes: meaning, usual cause, what to do.

A code never changes its meaning. Messages after which the user should do the same thing share one
code. `docs/codes.md` is generated from this table.

Over 600 lines: it is one table, in which similar codes are neighbors.
"""

from __future__ import annotations

from msgspec import Struct

OPTION = (2, 2)
FAULT = (3, 1)
REFUSAL = (1, 1)
"""Exit codes as pairs: of commands that only read (such as verify), and of commands that write.

OPTION: a wrong option. FAULT: damaged or contradictory files. REFUSAL: zckpt cannot do the task.
"""


class Code(Struct, frozen=True):
    """One code: its exit codes, what it means, the usual cause, and what the user should do.

    `exits` has a pair such as `FAULT` for each kind of error with this code. It is empty for
    warnings and notes, which never change an exit code.
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
            "The metadata assigns the same elements or bytes to two tensors or two ranks.",
            "Files of two saves are mixed, or the metadata is damaged.",
            "Copy all files of one save again.",
        ),
        "file-copied-over": Code(
            (FAULT,),
            "Two files that should differ hold the same bytes.",
            "One file was copied over the other.",
            "Copy all files again.",
        ),
        "file-cut-short": Code(
            (FAULT,),
            "A file ends before the end of its last tensor.",
            "A copy or a save was interrupted, or a disk was full.",
            "Take another copy of this file, or an earlier checkpoint.",
        ),
        "file-damaged": Code(
            (FAULT,),
            "A file contradicts itself, or holds something that no program writes.",
            "Bytes have changed, or the file was edited.",
            "Take another copy of this file, or an earlier checkpoint.",
        ),
        "file-not-understood": Code(
            (FAULT,),
            "A file cannot be read: it is damaged, or has a layout that zckpt does not know.",
            "Bytes have changed, or a newer version of the engine wrote the file.",
            "Try another copy of the file. If zckpt cannot read that either, see `zckpt formats` "
            "for the versions that it reads.",
        ),
        "file-too-large": Code(
            (REFUSAL,),
            "A header, a pickle or a manifest is larger than zckpt's limit.",
            "The file holds large values beside tensors, or the file is hostile.",
            "Save large values as tensors.",
        ),
        "lfs-pointer": Code(
            (FAULT,),
            "A file is a pointer of Git LFS instead of a checkpoint.",
            "The repository was cloned without its large files.",
            "Run `git lfs pull` in the repository.",
        ),
        "consent-needed": Code(
            (FAULT,),
            "One flipped bit explains a wrong checksum, but damage of many bits could look the "
            "same.",
            "The checksum covers many bytes, or a block of these bytes has one repeated value, as "
            "after the loss of a disk sector.",
            "Give an older checkpoint with `--older PATH`, which may prove the correction. Or "
            "accept the likely correction with `--accept-chance`.",
        ),
        "mended": Code(
            (),
            "A part of the checkpoint was damaged, and `zckpt mend` has restored it.",
            "A bit was flipped on a disk, in memory or in transfer, or a file was lost.",
            "Nothing, if the part was restored exactly. Otherwise some of its values may be wrong.",
        ),
        "not-mendable": Code(
            (FAULT,),
            "Bytes are damaged, and zckpt cannot tell what the original bytes were.",
            "Several bits were changed, or a file was cut short or lost.",
            "Take another copy of the file, or an older checkpoint.",
        ),
        "nothing-to-mend": Code(
            (REFUSAL,),
            "No damage was found, so there is nothing to mend.",
            "The checkpoint is intact, or its files have no checksums.",
            "Copy or convert the checkpoint.",
        ),
        "missing-file": Code(
            (FAULT,),
            "A file that all ranks share is missing.",
            "The file was not copied, was deleted, or the save did not finish.",
            "Copy the file from the original checkpoint, or use an earlier checkpoint.",
        ),
        "missing-rank-file": Code(
            (FAULT,),
            "The file of a rank is missing.",
            "A node's disk was not copied, or the save did not finish.",
            "Copy the file of the rank that the message names.",
        ),
        "record-damaged": Code(
            (FAULT,),
            "Bytes of a file do not match the checksum that the file stores for them.",
            "A bit was flipped on a disk, in memory or in transfer.",
            "Take another copy of this file, or an earlier checkpoint.",
        ),
        "source-changed": Code(
            (REFUSAL,),
            "A file changed or was removed while it was read.",
            "Another program writes or deletes files of the checkpoint.",
            "Stop the other program, or copy the checkpoint; then repeat the command.",
        ),
        "trainer-file-damaged": Code(
            (FAULT,),
            "A file that the trainer saved beside the checkpoint is missing or damaged.",
            "The save did not finish, or bytes have changed.",
            "Take another copy of the file, or an earlier checkpoint.",
        ),
        "unfinished-save": Code(
            (FAULT, REFUSAL),
            "The file that the engine writes last is missing, or a file is empty.",
            "The job ended during the save.",
            "Use an earlier checkpoint.",
        ),
        "unread-file-damaged": Code(
            (),
            "A file beside the checkpoint is damaged, but resuming does not read it.",
            "Bytes have changed, or a copy was interrupted.",
            "Take another copy of the file if you need it. The run resumes without this file.",
        ),
        "links-out": Code(
            (),
            "Files of the checkpoint are symbolic links to files outside its folder.",
            "The Hub's cache, DVC, git-annex and `cp -rs` store files as links.",
            "Nothing, if you trust the links. `--follow-links` also follows links of the trainer's "
            "files.",
        ),
        "unsafe-name": Code(
            (FAULT, REFUSAL),
            "A file name or a link leads out of the checkpoint's folder.",
            "A download cache stores its files as links, or the checkpoint is damaged or hostile.",
            "Replace the link by its file. If a file name leads out of the folder, do not trust "
            "the checkpoint.",
        ),
    },
    "Files that do not belong to one save": {
        "copies-differ": Code(
            (FAULT,),
            "Replicas of a tensor differ between ranks.",
            "Files of two saves are mixed, or the replicas drifted apart in training.",
            "Copy all files of one save again. If replicas drifted apart, choose values with "
            "`--replicas`.",
        ),
        "files-of-other-time": Code(
            (),
            "Files of some ranks were written long before or after the others.",
            "The files may be from another save, or copying has changed their times.",
            "Compare the files' sizes and times with the original ones.",
        ),
        "master-differs": Code(
            (FAULT,),
            "A weight does not equal its fp32 master, rounded to the weight's type.",
            "Files of two saves or ranks are mixed, or the program saved other weights than it "
            "trained.",
            "Copy all files of one save again. If the program saved other weights on purpose, such "
            "as an EMA's, add `--accept-weights`.",
        ),
        "mixed-saves": Code(
            (FAULT, REFUSAL),
            "Files contradict each other: they come from different saves or runs.",
            "Files of two saves are in one directory.",
            "Keep only the files of one save in the directory.",
        ),
        "partition-does-not-fit": Code(
            (FAULT,),
            "A rank has more or fewer elements than the engine's partitioning gives it.",
            "Files of different runs, saves or numbers of ranks are mixed.",
            "Copy all files of one save again.",
        ),
        "ranks-disagree": Code(
            (FAULT, REFUSAL),
            "Files of two ranks state different shapes or values for the same tensor or setting.",
            "Files of different saves or models are mixed.",
            "Copy all files of one save again.",
        ),
        "rank-slices": Code(
            (FAULT,),
            "Each rank's file holds slices of tensors, but stores them as if they were complete.",
            "The program saved the local tensors of each rank as plain tensors.",
            "Save with torch.distributed.checkpoint, or gather the tensors first.",
        ),
        "saved-name-unknown": Code(
            (),
            "Files do not contain the names under which they were saved.",
            "Old versions of torch, or of zckpt, did not store names in files.",
            "Nothing. If files may have been swapped, compare with another copy.",
        ),
        "steps-disagree": Code(
            (FAULT,),
            "Files state different steps of the optimizer, or of the trainer and its engine.",
            "Files of two saves are mixed.",
            "Copy all files of one save again, or choose a step with `--step-policy`.",
        ),
        "swapped-files": Code(
            (FAULT,),
            "A file contains the name or the rank of another file.",
            "Two files were swapped or renamed.",
            "Copy all files again under their original names.",
        ),
        "world-size-disagrees": Code(
            (FAULT,),
            "Files state a number of ranks that differs from the number of files.",
            "Files of two runs are mixed, or some files are missing.",
            "Copy all files of one save again.",
        ),
    },
    "Which checkpoint": {
        "no-checkpoint": Code(
            (REFUSAL,),
            "A run holds no checkpoint, or does not exist yet.",
            "The run has not saved yet, or the path is wrong.",
            "Check the path, if the run should have saved.",
        ),
        "no-such-path": Code(
            (REFUSAL,),
            "The path does not exist, or is a file instead of a directory (or the reverse).",
            "The path is misspelled, or its filesystem is not mounted.",
            "Check the path.",
        ),
        "not-a-checkpoint": Code(
            (REFUSAL,),
            "No format recognizes the path.",
            "The path is not the folder or file that the training saved.",
            "Give the directory that the training program saved.",
        ),
        "other-folder-needed": Code(
            (REFUSAL,),
            "This folder or file has only the model, or only the optimizer.",
            "The program saves the model and the optimizer in two folders or files.",
            "Give the path that contains both model and optimizer.",
        ),
        "pointer-dangling": Code(
            (FAULT, REFUSAL),
            "A run's pointer file (such as `latest`) names a checkpoint that does not exist.",
            "The checkpoint was removed or renamed, or the pointer file was cut short.",
            "Choose a checkpoint with `--tag`.",
        ),
        "names-alone": Code(
            (REFUSAL,),
            "The directory has the file names of a checkpoint, but no data.",
            "The directory was made by `zckpt.auto_resume(RUN, copy=False)` for DeepSpeed's "
            "loader.",
            "Give the path of the checkpoint that the message names.",
        ),
        "several-checkpoints": Code(
            (REFUSAL,),
            "The path holds several checkpoints, and no option chooses one.",
            "The path is a run's directory.",
            "Give the path of one checkpoint.",
        ),
        "several-formats": Code(
            (REFUSAL,),
            "The path holds checkpoints of several formats.",
            "Two programs saved in one directory.",
            "Choose a format with `--from`.",
        ),
        "several-models": Code(
            (OPTION, REFUSAL),
            "The checkpoint has several models or optimizers.",
            "The program saved several models or optimizers together.",
            "Choose a model or an optimizer with `--root`.",
        ),
        "several-tags": Code(
            (REFUSAL,),
            "The path holds several tags, and no file names the current one.",
            "The file `latest` is missing.",
            "Choose a tag with `--tag`.",
        ),
        "unfinished-target": Code(
            (FAULT,),
            "The path is a target of zckpt that is not complete.",
            "A run of zckpt still writes the target, or was stopped.",
            "Wait until the other run ends, or repeat its command with `--resume`.",
        ),
    },
    "What zckpt does not read": {
        "grid-unsupported": Code(
            (REFUSAL,),
            "The model was divided among the ranks in a way that zckpt does not read.",
            "The run combines parallel axes in an unsupported way.",
            "Save with other sizes of the parallel axes. `docs/limits.md` lists what is not "
            "supported.",
        ),
        "layout-unknown": Code(
            (FAULT, REFUSAL),
            "The files do not show which of their bytes belong to which tensor.",
            "The engine's files do not state the order or the names of the tensors.",
            "Take a checkpoint that states order and names of its tensors, as the hint says.",
        ),
        "optimizer-unsupported": Code(
            (OPTION, REFUSAL),
            "The optimizer is not known to zckpt or to the target.",
            "Only the optimizer's own code can interpret its states.",
            "Convert with another `--optimizer`, or add `--weights-only`.",
        ),
        "proof-unsupported": Code(
            (REFUSAL,),
            "The files do not allow the comparison that `verify` was asked to make.",
            "With `--gather`, the files of the ranks cannot be joined. Or the comparison needs "
            "values, and the proof file has only checksums.",
            "Verify without `--gather`, or compare with the checkpoint instead of its proof file.",
        ),
        "state-unsupported": Code(
            (REFUSAL,),
            "The target cannot store an optimizer state, or zckpt cannot read this state.",
            "The state belongs to one rank, to one number of ranks, or to a Python class.",
            "Choose a target that can store the state, or drop the state with `--drop-state`.",
        ),
        "storage-unsupported": Code(
            (REFUSAL,),
            "A tensor is stored in a way that zckpt does not read.",
            "The tensor is compressed, chunked, not contiguous or big-endian.",
            "Save the tensor again as a plain, contiguous one, as the hint says.",
        ),
        "type-unsupported": Code(
            (FAULT, REFUSAL),
            "A tensor or value has a type that zckpt does not read or convert.",
            "The program saved an unusual class or type.",
            "Cast the tensor or value before saving, or leave it out.",
        ),
        "version-unsupported": Code(
            (REFUSAL,),
            "The files are of a version that zckpt does not read.",
            "The files are very old, or newer than this zckpt.",
            "Install a newer zckpt, or save with another version of the engine.",
        ),
        "writer-unsupported": Code(
            (REFUSAL,),
            "The files were saved by an option or extension of the engine that is not supported.",
            "The run used an option or extension that zckpt cannot read.",
            "Save without the option or extension, as the hint says.",
        ),
    },
    "What the source lacks": {
        "model-config-wrong": Code(
            (REFUSAL,),
            "The configuration (config.json) is missing, or does not describe this model.",
            "The trainer did not save config.json, or this file belongs to another model.",
            "Give the configuration of this model with `--config`.",
        ),
        "cuts-unknown": Code(
            (REFUSAL,),
            "The files do not state how tensor-parallel ranks slice the parameters.",
            "The engine does not store its slicing rules.",
            "Give slicing rules with `--tp-rules`, or a run of the same model with `--like`.",
        ),
        "groups-missing": Code(
            (REFUSAL,),
            "The source has no parameter groups, which the target needs.",
            "The source's files do not store parameter groups.",
            "Take a checkpoint that has the optimizer, or add `--weights-only`.",
        ),
        "hyperparameter-missing": Code(
            (REFUSAL,),
            "The source does not state a hyper-parameter that the target needs.",
            "The source's optimizer does not have this hyper-parameter, or the files do not store "
            "it.",
            "Give the hyper-parameter with `--group-defaults`.",
        ),
        "masters-missing": Code(
            (),
            "The source has no fp32 masters: the target's masters are made from the weights.",
            "The program trained without masters, or saved only weights.",
            "If the program trained without masters, do nothing. Otherwise take a checkpoint with "
            "masters.",
        ),
        "names-needed": Code(
            (REFUSAL,),
            "The optimizer numbers its parameters, and the parameters' names cannot be inferred.",
            "Shapes or bytes match several parameters, or none.",
            "Give the parameters' names with `--param-names`.",
        ),
        "never-updated": Code(
            (),
            "The optimizer lists a parameter that it never updated.",
            "The parameter got no gradient, or its optimizer state is lost.",
            "If the program does not train the parameter, name it with `--frozen`.",
        ),
        "one-value-needed": Code(
            (FAULT,),
            "The target stores one value for several parameters whose values differ.",
            "Parameters of one optimizer group have different steps or other numbers.",
            "Choose a target that stores these numbers for each parameter. If steps differ, "
            "`--step-policy` can choose one step.",
        ),
        "optimizer-missing": Code(
            (FAULT, REFUSAL),
            "The source has no optimizer state, or no trained parameters.",
            "The source was saved without an optimizer, another file has the optimizer, or its "
            "files are lost, damaged or of a kind that is not read.",
            "Write only the weights: `--weights-only`.",
        ),
        "state-missing": Code(
            (FAULT, REFUSAL),
            "A parameter lacks an optimizer state that other parameters of its group have.",
            "The optimizer state was lost, or never created.",
            "Take another checkpoint, or a target that does not need this optimizer state.",
        ),
        "step-missing": Code(
            (REFUSAL,),
            "The source does not state its step (the number of optimizer updates).",
            "The source's files do not store the step.",
            "Give the step with `--step-policy N`.",
        ),
        "weights-missing": Code(
            (FAULT, REFUSAL),
            "The files lack weights that are needed.",
            "The program did not save the weights, or they are in another file.",
            "Take a checkpoint that has all weights.",
        ),
    },
    "Targets": {
        "name-unsupported": Code(
            (REFUSAL,),
            "The target cannot store a tensor or key of this name.",
            "The target's file format or its engine does not allow such a name.",
            "Choose another format, or rename the tensor or key.",
        ),
        "not-enough-space": Code(
            (REFUSAL,),
            "The filesystem has too little space, or limits the size of files.",
            "The target is about as large as the source.",
            "Free some space, or choose another filesystem.",
        ),
        "nowhere-to-write": Code(
            (REFUSAL,),
            "The resharded checkpoint cannot be written to its usual folder below the run.",
            "The run's directory is read-only, or full.",
            "Name a folder with `--scratch`.",
        ),
        "output-not-writable": Code(
            (OPTION,),
            "The file for a report cannot be written.",
            "The file's folder is missing or read-only, or the path is taken by something that "
            "zckpt must not replace.",
            "Name another file for the report.",
        ),
        "target-being-written": Code(
            (REFUSAL,),
            "Another run of zckpt is writing this target now.",
            "Two jobs were started for one target.",
            "Wait for the other run, or choose another target.",
        ),
        "target-exists": Code(
            (REFUSAL,),
            "The target exists, and zckpt never overwrites a target.",
            "An earlier command, or another program, wrote the target.",
            "Choose another target, or remove the existing one.",
        ),
        "target-in-source": Code(
            (OPTION,),
            "The target is the source, or lies inside of it.",
            "Both paths lead to the same place, perhaps through a link.",
            "Choose a target beside the source.",
        ),
        "target-not-resumable": Code(
            (REFUSAL,),
            "The unfinished target was begun from another source, or with other options or another "
            "version of zckpt.",
            "The source, the options or zckpt's version have changed since the target was begun.",
            "Use the same source, options and version as before, or remove the target.",
        ),
        "target-unfinished": Code(
            (REFUSAL,),
            "A run of zckpt was stopped while it wrote this target.",
            "A signal, a crash or a power loss ended the run of zckpt.",
            "Add `--resume` to continue, or remove the target.",
        ),
        "target-unsafe": Code(
            (REFUSAL,),
            "The target's folder has something that zckpt did not create for you.",
            "A link, a pipe or another user's file is in the folder.",
            "Choose another target, or remove what the message names.",
        ),
        "target-unsupported": Code(
            (OPTION, FAULT, REFUSAL),
            "This source cannot be written in the requested format and sizes.",
            "The target's engine cannot store something that the source has, or zckpt does not "
            "know how the engine would store it.",
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
            "The ds_config belongs to another run, is not JSON, or sets something that zckpt does "
            "not write.",
            "Correct the ds_config as the message says.",
        ),
        "family-does-not-fit": Code(
            (OPTION, REFUSAL),
            "The parameters of the source do not match the rules of `--family`.",
            "The model has another architecture, or other sizes.",
            "Choose another family, or give the model's sizes in `--family`.",
        ),
        "like-does-not-fit": Code(
            (OPTION, FAULT, REFUSAL),
            "The run of `--like` or `--groups-from` belongs to another model or program.",
            "The run has other parameters, shapes, states or files than the source, or no "
            "optimizer groups.",
            "Give a run of the same model, saved by the program that will load the target.",
        ),
        "names-collide": Code(
            (OPTION, FAULT),
            "Two tensors would get the same name.",
            "A rule renames both tensors, or their names differ only in wrappers' prefixes.",
            "Change the rule, or rename one of the tensors with `--rename`.",
        ),
        "names-do-not-fit": Code(
            (OPTION, REFUSAL),
            "Names that an option gives do not match the checkpoint.",
            "The list has other names than the checkpoint, too many or too few names, or another "
            "order.",
            "Correct the list; the hint says in which order the names must be.",
        ),
        "option-invalid": Code(
            (OPTION, FAULT),
            "The value of an option is not allowed.",
            "The value is misspelled, or out of range.",
            "See `zckpt COMMAND --help` for the allowed values.",
        ),
        "option-names-nothing": Code(
            (OPTION,),
            "An option names something that the checkpoint does not have.",
            "The name is misspelled, or is that of another checkpoint.",
            "Choose one of the names in the hint.",
        ),
        "option-needed": Code(
            (OPTION, REFUSAL),
            "The command needs another option.",
            "The files lack a fact that the option states, or another option needs this one too.",
            "Add the option that the hint names.",
        ),
        "option-not-applicable": Code(
            (OPTION, REFUSAL),
            "An option does not apply to this source or target.",
            "The option belongs to another format.",
            "Leave the option out.",
        ),
        "option-without-effect": Code(
            (),
            "An option changes nothing in the result.",
            "The files already state what the option gives, or nothing that is written depends on "
            "it.",
            "Leave the option out.",
        ),
        "options-conflict": Code(
            (OPTION, FAULT),
            "Options exclude each other.",
            "The options ask for different things.",
            "Leave one of the options out.",
        ),
        "sizes-do-not-fit": Code(
            (OPTION, REFUSAL),
            "The sizes of the parallel axes do not divide the number of ranks or the tensors.",
            "Ranks, heads, rows or experts cannot be divided evenly.",
            "Choose other sizes of the parallel axes.",
        ),
        "stages-do-not-fit": Code(
            (OPTION,),
            "The bounds of the pipeline's stages do not fit the model.",
            "The bounds omit layers, or leave a stage without parameters.",
            "Give other bounds with `--pp-bounds`.",
        ),
        "tp-rule-wrong": Code(
            (OPTION, FAULT, REFUSAL),
            "A rule of tensor parallelism does not fit the ranks' tensors.",
            "The rule is for another model, or files of two runs are mixed.",
            "Correct the rule, and give it with `--tp-rules`.",
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
            "The hardware is faulty, or the filesystem is no longer mounted.",
            "See `dmesg`, mount the filesystem again, or take another copy of the files.",
        ),
        "extra-missing": Code(
            (REFUSAL,),
            "A package that this command needs is not installed, or is too old.",
            "The package belongs to an optional extra of zckpt, such as `zckpt[torch]`.",
            "Run the pip command in the hint.",
        ),
        "internal-error": Code(
            (REFUSAL,),
            "There is a bug in zckpt, or in a reader that was added to it.",
            "The authors of zckpt did not foresee this case.",
            "Report the bug, with the traceback that `ZCKPT_TRACEBACK=1` prints.",
        ),
        "interrupted": Code(
            (REFUSAL,),
            "A signal stopped the command; the exit code is 128 and the signal's number.",
            "Ctrl-C was pressed, or the time of the job ended.",
            "Repeat the command, with `--resume` if the hint says so.",
        ),
        "launcher-variables": Code(
            (OPTION, REFUSAL),
            "The processes of the launch cannot connect to each other.",
            "A launcher's variables are missing or contradict each other, or the port is taken.",
            "Start the command with torchrun, set another MASTER_PORT, or add `--single`.",
        ),
        "nothing-to-clean": Code(
            (OPTION, REFUSAL),
            "There are no files of an unfinished run of zckpt.",
            "The target is complete, or was never begun.",
            "Give the target of the stopped run.",
        ),
        "out-of-memory": Code(
            (REFUSAL,),
            "Too little memory is free.",
            "Other programs use the memory, or `-j` and `--memory` are high.",
            "Use a lower `-j` or `--memory`.",
        ),
        "permission-denied": Code(
            (REFUSAL,),
            "You may not read or write a file or directory.",
            "The files belong to another user, or the filesystem is read-only.",
            "Check the permissions: `namei -l PATH` lists them.",
        ),
        "process-failed": Code(
            (REFUSAL,),
            "Another process of this command failed.",
            "The other process has printed the reason.",
            "Read the message of the process that failed.",
        ),
        "process-lost": Code(
            (REFUSAL,),
            "Another process of this command is gone.",
            "The other process was killed, or its node failed.",
            "End all processes, and repeat the command with `--resume`.",
        ),
        "processes-disagree": Code(
            (OPTION, REFUSAL),
            "The processes were not started for the same command.",
            "The processes have different arguments, files or versions of zckpt.",
            "Start all processes with the same arguments and version, on the same files.",
        ),
        "remains-of-runs": Code(
            (),
            "Other runs of zckpt left unfinished directories, or such directories were removed.",
            "The jobs that wrote the directories ended before they were complete.",
            "If no job still writes into the directories that the message names, remove them.",
        ),
        "shared-files-differ": Code(
            (REFUSAL,),
            "A process does not see a file that another process wrote.",
            "The nodes do not share the filesystem.",
            "Check that all nodes mount the same filesystem.",
        ),
        "store-refused": Code(
            (REFUSAL,),
            "The object store refused a request, or did not answer.",
            "The store's credentials, region, clock or network may be wrong.",
            "Do what the hint says; then repeat the command with `--resume`.",
        ),
        "store-unsupported": Code(
            (OPTION, REFUSAL),
            "The object store cannot be used for this command.",
            "The store cannot send a range of bytes of a file, or does not accept uploads.",
            "Copy the checkpoint to a filesystem first.",
        ),
        "system-error": Code(
            (REFUSAL,),
            "The operating system refused a request.",
            "The message quotes the operating system's reason.",
            "Check the path, and whether you may read or write it.",
        ),
        "too-many-open-files": Code(
            (REFUSAL,),
            "A process or the machine has too many open files.",
            "The limit is low, or `-j` is high.",
            "Raise the limit (`ulimit -n`), or use a lower `-j`.",
        ),
        "store-without-condition": Code(
            (),
            "The store cannot prevent two programs from writing the same file.",
            "The store does not support `If-None-Match`.",
            "Make sure that no other program writes to the target at the same time.",
        ),
        "upload-damaged": Code(
            (FAULT,),
            "The bytes of a file in the store differ from the bytes that were sent.",
            "The network or the store changed bytes.",
            "Repeat the command with `--resume`.",
        ),
    },
    "Resuming": {
        "load-unsupported": Code(
            (OPTION,),
            "The checkpoint cannot be loaded into this engine without writing a resharded copy.",
            "The engine's version was not tested, or the run uses tensor, pipeline, expert or "
            "sequence parallelism.",
            "Let zckpt write the copy, as the hint says.",
        ),
        "batch-size-changes": Code(
            (),
            "The next run would have another global batch than the checkpoint.",
            "The number of ranks changes, but not the batch size per rank; or the reverse.",
            "Set the batch size per rank as the message says.",
        ),
        "checkpoint-set-aside": Code(
            (),
            "A newer checkpoint is skipped.",
            "The newer checkpoint is incomplete or damaged.",
            "Nothing: the run resumes from an older checkpoint. `zckpt verify` shows what is "
            "wrong with the newer one.",
        ),
        "format-differs": Code(
            (FAULT,),
            "The engine does not load checkpoints of this format, or not from this path.",
            "Another engine saved the checkpoint, or it is in an object store.",
            "Run the command that the report proposes.",
        ),
        "none-is-whole": Code(
            (FAULT,),
            "The run has checkpoints, but none is complete.",
            "Each checkpoint is damaged or lacks files.",
            "Run `zckpt verify PATH` for each checkpoint. To start anew, choose another directory.",
        ),
        "parameters-differ": Code(
            (FAULT,),
            "The checkpoint has other parameters or shapes than the program.",
            "The checkpoint belongs to another model.",
            "Give the checkpoint of this model, or rename the checkpoint's parameters.",
        ),
        "pointer-behind": Code(
            (),
            "The run's pointer (such as `latest`) does not name the newest checkpoint.",
            "The newest save has not ended, or a user made the run go back to an older checkpoint.",
            "Nothing: zckpt uses the checkpoint that the pointer names.",
        ),
        "groups-differ": Code(
            (FAULT,),
            "The optimizer of the next program has other parameter groups than the checkpoint, or "
            "trains other parameters.",
            "The next program has another rule for weight decay, or freezes other parameters.",
            "Write the checkpoint with the program's groups: `zckpt reshard --groups-from RUN`, "
            "where RUN is a checkpoint that the program has saved.",
        ),
        "program-does-not-fit": Code(
            (FAULT, REFUSAL),
            "The program asks for a tensor or value that the checkpoint lacks, or has in another "
            "form.",
            "Names, groups, scheduler or types differ between program and checkpoint.",
            "Build the program with the groups or the scheduler of the checkpoint, rename "
            "parameters, or give StorageReader the model and the optimizer.",
        ),
        "program-must-set": Code(
            (FAULT,),
            "The program that loads the target must do or set something.",
            "The engine's files have no place for a setting, or its loader ignores the setting.",
            "Do what the message says before training resumes.",
        ),
        "scheduler-differs": Code(
            (FAULT,),
            "The scheduler of the next run needs a state that the checkpoint does not have.",
            "The next run's ds_config names a scheduler that the saving program did not use.",
            "Run the command that the report proposes, or `zckpt auto-resume`.",
        ),
        "size-differs": Code(
            (FAULT,),
            "The engine loads this checkpoint only on another number of ranks, or at another ZeRO "
            "stage.",
            "The checkpoint was saved by another number of ranks, or at another stage.",
            "Run the command that the report proposes, or `zckpt auto-resume`.",
        ),
    },
    "What looking finds": {
        "bytes-unknown": Code(
            (FAULT,),
            "A file contains bytes that its header or metadata does not describe.",
            "The entry of a tensor was lost, or the file is from another save.",
            "Compare the file with another copy.",
        ),
        "checksum-missing": Code(
            (),
            "Some bytes have no checksum in the files, so zckpt may miss damage in them.",
            "The bytes were saved with checksums switched off, or by an engine without them.",
            "Compare the files with another copy; a universal checkpoint has checksums.",
        ),
        "moment-impossible": Code(
            (),
            "A moment has values that its optimizer never produces.",
            "Bytes have changed, or the tensor is not the moment that its name says.",
            "Compare with an earlier checkpoint.",
        ),
        "step-doubtful": Code(
            (),
            "The step may not be the true number of updates.",
            "The run was saved before its first update, or the type of the step cannot count "
            "further.",
            "Check that the step is the one you expect, and keep steps in fp32.",
        ),
        "not-finite": Code(
            (),
            "A tensor has NaN or infinities.",
            "The training has diverged, or a type was too narrow.",
            "Resume from an earlier checkpoint.",
        ),
        "not-compared": Code(
            (),
            "A part of a checkpoint was not compared, so this part may differ.",
            "One side cannot store the part, or an option left it out.",
            "Read which part the message names, and compare that by hand if it matters.",
        ),
        "nothing-to-compare": Code(
            (OPTION, REFUSAL),
            "The two paths have nothing in common that can be compared.",
            "The two paths are of different models, or their tensors have different names.",
            "Check both paths, or match the names with `--rename`.",
        ),
        "padding-differs": Code(
            (),
            "Padding between tensors is not zero. No tensor is affected.",
            "The engine did not clear the padding, or bits were flipped in it.",
            "Nothing.",
        ),
        "rank-zero-taken": Code(
            (),
            "Each rank has its own values of a tensor or state, and zckpt uses those of rank 0.",
            "The training does not synchronise this tensor or state between ranks.",
            "Nothing, if the values of rank 0 are good enough for the run.",
        ),
        "tensor-differs": Code(
            (FAULT,),
            "A tensor differs in value, type or shape.",
            "The two checkpoints are from different steps or runs, or one is damaged.",
            "Look at the first elements that differ, which the report lists.",
        ),
        "tensor-missing": Code(
            (FAULT,),
            "One checkpoint lacks a tensor that the other one has.",
            "The tensor was dropped, or the checkpoints are of different models.",
            "Check whether the target needs this tensor.",
        ),
        "too-small": Code(
            (),
            "A tensor has denormal numbers, which are too small for its type.",
            "The type is too narrow for the tensor's values.",
            "Nothing, or choose a type with a larger range.",
        ),
        "form-differs": Code(
            (),
            "Both checkpoints have the same value, but store it differently: in another type, or "
            "the step elsewhere (such as per group instead of per parameter).",
            "The two engines store the value differently.",
            "Nothing.",
        ),
        "unproven": Code(
            (FAULT,),
            "The two checkpoints are equal only if the inferred names of parameters are right.",
            "The names of parameters were inferred in both checkpoints.",
            "Give the parameters' names with `--param-names`.",
        ),
        "values-constant": Code(
            (),
            "All elements of a tensor are equal.",
            "No gradient has reached the parameter, or the program never initialised it.",
            "Check whether the program uses the parameter.",
        ),
    },
    "What was inferred or assumed": {
        "frozen-inferred": Code(
            (),
            "Tensors are assumed to be frozen parameters or buffers.",
            "No optimizer lists the tensors.",
            "If the program trained these tensors, their optimizer states are lost; see the "
            "message.",
        ),
        "value-assumed": Code(
            (),
            "A value is the optimizer's default, or comes from the run of `--like` or "
            "`--groups-from`.",
            "The source does not store the value.",
            "Check the value; `--group-defaults` sets hyper-parameters.",
        ),
        "names-inferred": Code(
            (),
            "Names of parameters were inferred from their order, shapes or bytes.",
            "The files number the parameters instead of naming them.",
            "Check the names, or give them with `--param-names`.",
        ),
        "place-inferred": Code(
            (),
            "The position of a layer, a tensor or a checkpoint was inferred: its pipeline stage, "
            "its model, or its order in the run.",
            "No file states the position of this layer, tensor or checkpoint.",
            "Check the inferred position, as the message says.",
        ),
        "root-inferred": Code(
            (),
            "An optimizer was matched with a model by its name.",
            "The files do not show to which model the optimizer belongs.",
            "If the match is wrong, choose with `--root`.",
        ),
        "tie-inferred": Code(
            (),
            "Equal weights are treated as tied, or the source's missing output layer may be tied.",
            "The files do not state which weights are tied.",
            "If the weights should not be tied, see the message; `--tie` states tied weights.",
        ),
    },
    "What a target gets": {
        "begins-afresh": Code(
            (),
            "Parameters that the source did not train begin without optimizer states.",
            "The run of `--groups-from` trains these parameters, but the source did not.",
            "Nothing.",
        ),
        "begins-late": Code(
            (),
            "Parameters that the source did not train begin with zero moments at a late step.",
            "The run of `--groups-from` trains these parameters in a group with others, and the "
            "target stores one step for the whole group.",
            "Put the new parameters into a separate group in the next program, where they begin "
            "without a state. Or lower the learning rate.",
        ),
        "best-elsewhere": Code(
            (),
            "The best checkpoint of the run is not among those that were written.",
            "The Trainer's state names another checkpoint as the best one.",
            "Convert the best checkpoint too: `--checkpoints best-and-last`.",
        ),
        "engine-fault": Code(
            (FAULT, REFUSAL),
            "The engine that wrote or will load the files has a known fault.",
            "The engine's version, or an option of the run, is known to have the fault.",
            "Do what the message says; `docs/limits.md` lists more faults.",
        ),
        "file-omitted": Code(
            (),
            "A file beside the checkpoint is not copied.",
            "The target has a file of this name already, or does not use such a file.",
            "Copy the file by hand if your program needs it.",
        ),
        "loss-scale-low": Code(
            (),
            "The dynamic loss scale is at its minimum.",
            "Gradients have overflowed often.",
            "If gradients still overflow, resume from an earlier checkpoint.",
        ),
        "moments-lost": Code(
            (),
            "The moments in the target are zeros, or older than the weights.",
            "The moments of the source are lost.",
            "You need not do anything, but the next updates differ from those of an undamaged run.",
        ),
        "name-changed": Code(
            (),
            "Prefixes that a wrapper or an attribute of the program added (such as `module.`) were "
            "removed from names.",
            "The program that loads the target, or a comparison of two checkpoints, needs names "
            "without the added prefixes.",
            "If you need other names, set them with `--rename`.",
        ),
        "name-omitted": Code(
            (),
            "A second name of a tied weight is not in the target.",
            "The target's files store each weight once, under one name.",
            "Tie the weights in the program.",
        ),
        "not-exact": Code(
            (),
            "The state in the target is exact, but training will not go on exactly the same.",
            "The optimizer's result depends on the number of ranks, or the target's engine "
            "updates weights by another rule (such as for weight decay).",
            "Nothing.",
        ),
        "rank-state-omitted": Code(
            (),
            "State of single ranks, such as of random generators, is not in the target.",
            "The state of one rank has no meaning on another number of ranks.",
            "Nothing. Random numbers will differ from those of the old run.",
        ),
        "size-kept": Code(
            (),
            "The target has the same data-parallel size as the source.",
            "No `--dp` was given.",
            "Add `--dp N` for another size.",
        ),
        "state-dropped": Code(
            (),
            "Because of an option, an optimizer state of the source is not in the target.",
            "The option `--drop-state` names the state, or the run of `--groups-from` does not "
            "train the state's parameter.",
            "If the optimizer cannot begin without this state, convert again without "
            "`--drop-state` or `--groups-from`.",
        ),
        "state-omitted": Code(
            (),
            "Some state of the source is not in the target.",
            "The target cannot store this state, or does not use it.",
            "Nothing, or set the state in the program that resumes.",
        ),
        "target-not-synced": Code(
            (),
            "The target is complete, but the last step of writing it failed.",
            "The filesystem failed to sync or to remove a file.",
            "Run the command in the message.",
        ),
        "weights-differ-by-design": Code(
            (),
            "Weights differ from their rounded fp32 masters, and both are kept.",
            "The engine changes the weights after each update.",
            "Nothing.",
        ),
        "weights-omitted": Code(
            (),
            "The checkpoint has weights that are not in the target.",
            "The omitted weights are averages (such as an EMA's), or belong to another model.",
            "If you need the omitted weights, choose them with `--root`, as the message says.",
        ),
    },
    "Others": {
        "said-by-source": Code(
            (),
            "A message without a code, which an older zckpt wrote into the checkpoint.",
            "The checkpoint's manifest is from an old zckpt, whose messages had no codes.",
            "Read the message.",
        ),
    },
}

CODES = {code: row for codes in TOPICS.values() for code, row in codes.items()}
