"""The documents of `--json`: the keys that each command prints, and their types.

`zckpt schema COMMAND` prints the JSON Schema that msgspec makes of them. A later version may add
keys: programs that read a document should ignore keys that they do not know.

Over 600 lines: it is one list of records, which are read side by side.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ..errors import WrongOption, meant

Json = dict[str, Any]
Number = int | float | str | None
"""A number. NaN and infinities are the strings "nan", "inf" and "-inf"."""
Step = int | float | None


class Notice(Struct):
    """An error, a warning or a note. docs/codes.md lists the codes."""

    code: str
    severity: Literal["error", "warning", "note"]
    subject: str | None
    file: str | None
    message: str
    hint: str


class Problem(Notice):
    """A problem that `verify` or `diff` has found."""

    error: str | UnsetType = UNSET
    tensor: str | UnsetType | None = UNSET
    tensors: list[str] | UnsetType = UNSET
    offset: int | UnsetType | None = UNSET
    length: int | UnsetType | None = UNSET
    stated: str | UnsetType = UNSET
    found: str | UnsetType = UNSET
    harmless: bool | UnsetType = UNSET
    flipped: dict[str, int] | UnsetType = UNSET
    element: int | UnsetType = UNSET
    parameters: list[str] | UnsetType = UNSET


class Fault(Notice):
    """A fault that `report` or `stats` has found, or only an oddity, if `fault` is false."""

    kind: str
    tensor: str | None
    offset: int | UnsetType | None = UNSET
    length: int | UnsetType | None = UNSET
    fault: bool | UnsetType = UNSET
    checkpoint: str | UnsetType | None = UNSET


class Records(Struct):
    """Counts of records, which are byte ranges of files (such as a tensor's) with a checksum.

    `checked` records match their checksum. `unchecked` ones were not compared: this number includes
    `without_checksum`, the records for which the files store no checksum.
    """

    checked: int
    unchecked: int
    without_checksum: int


class State(Struct):
    """The name of an optimizer state, how many parameters have it, and why the report lists it."""

    state: str
    parameters: int
    reason: str | UnsetType = UNSET
    form: str | UnsetType = UNSET


class Slot(Struct):
    """Totals of one slot, which is a kind of tensor: weights, masters, or one optimizer state."""

    tensors: int
    dtype: str
    elements: int
    bytes: int


class Sighting(Struct):
    """A place in the files that stores a step, which is a number of updates.

    `truth` is true if zckpt uses this step, and false if it uses that of another place.
    """

    where: str
    step: int | float
    truth: bool


class Document(Struct, kw_only=True):
    """The keys that all documents have. `zckpt` is the version of the report format."""

    zckpt: Literal[2]
    command: str


class Error(Notice, kw_only=True):
    """A command that failed; `error` is the class of the exception in Python."""

    zckpt: Literal[2]
    command: str | None
    error: str
    path: str | UnsetType = UNSET
    """The PATH that could not be read, if the command has several PATHs."""


class Reports(Document, kw_only=True):
    """The document of `inspect`, `verify` or `check` for several PATHs.

    `reports` has one item per PATH, in the order of the PATHs: the document that the command prints
    for this PATH alone, or its error.
    """

    reports: list[Json]


class Inspect(Document, kw_only=True):
    """The document that `zckpt inspect --json` prints."""

    format: str
    path: str
    written_by: str
    version: str | UnsetType | None = UNSET
    zero_stage: int | UnsetType | None = UNSET
    dp: int | UnsetType | None = UNSET
    tag: str | UnsetType | None = UNSET
    ep: int | UnsetType | None = UNSET
    tp: int | UnsetType | None = UNSET
    pp: int | UnsetType | None = UNSET
    sp: int | UnsetType | None = UNSET
    model_ranks: int | UnsetType | None = UNSET
    tp_rules: str | UnsetType | None = UNSET
    dialect: str | UnsetType | None = UNSET
    slices: int | UnsetType | None = UNSET
    root: str | UnsetType | None = UNSET
    mesh: list[str | None] | UnsetType | None = UNSET
    step: Step
    complete: bool
    optimizer: str | None
    roots: dict[str, list[str]] | UnsetType = UNSET
    parameters: int
    elements: int
    slots: dict[str, Slot]
    states: list[State]
    experts: list[Json] | UnsetType = UNSET
    groups: list[Json] | None
    steps: list[Sighting]
    files: int
    bytes: int
    unopened: int | UnsetType = UNSET
    problems: list[Notice]
    left_out: list[Notice]
    inferred: list[str]
    objects: list[str]
    tensors: list[Json] | UnsetType = UNSET
    state: Any = UNSET


class Conversion(Document, kw_only=True):
    """The document that `zckpt convert --json`, `reshard` and `export` print."""

    source: Json
    format: str
    target: str
    about: str
    next: str
    step: Step
    files: list[str]
    bytes: int
    copied: list[str]
    left_out: list[Notice]
    dropped: list[State]
    computed_afresh: list[State]
    warnings: list[Notice]
    inferred: list[str]
    tensors: int | UnsetType = UNSET
    records: Records | UnsetType = UNSET
    seconds: float | UnsetType = UNSET
    resumed: int | UnsetType = UNSET
    rank: int | UnsetType = UNSET
    part: str | UnsetType = UNSET
    waits_for_parts: bool | UnsetType = UNSET
    already_complete: bool | UnsetType = UNSET
    dry_run: bool | UnsetType = UNSET
    memory: int | UnsetType = UNSET
    free: int | UnsetType = UNSET
    checkpoints: list[str] | UnsetType = UNSET
    advice: Notice | UnsetType = UNSET
    sent: int | UnsetType = UNSET
    read_back: int | UnsetType = UNSET


class Restored(Notice):
    """A damaged record (a byte range with a checksum) that `zckpt mend` found.

    record           the offset and length of the record
    tensors          the tensors in the record
    state            "lost" if mend cannot restore the record, "needs-consent" if it does so only
                     with --accept-chance, "accepted" if this was given
    offset, bytes    the first restored byte of the file, and the number of restored bytes
    by               the evidence for the restored bytes
    bit, element     the flipped bit, if only one was flipped, and its tensor's element
    before, after    the values of this element
    chance           the probability that damage of many bits looks like this
    """

    state: Literal["restored", "accepted", "needs-consent", "lost"]
    chance: float
    record: dict[str, int]
    tensors: list[str]
    offset: int | UnsetType = UNSET
    bytes: int | UnsetType = UNSET
    by: Literal["checksum", "witness", "chance"] | UnsetType = UNSET
    bit: int | UnsetType | None = UNSET
    tensor: str | UnsetType | None = UNSET
    element: int | UnsetType | None = UNSET
    before: Number | bool | UnsetType = UNSET
    after: Number | bool | UnsetType = UNSET
    witness: str | UnsetType = UNSET


class OfTensor(Struct):
    """The number of `elements` of a tensor that were in lost files, out of `of` elements."""

    tensor: str
    elements: int
    of: int


class LostPart(Notice):
    """Something that lost files contained.

    `state` tells whether it can be restored:

    elsewhere  other files have the values, or values from which they follow
    made-up    no file has the values, but `mend --rebuild` can write other values
    rebuilt    `mend --rebuild` has written other values
    gone       no file has the values, and no other values can replace them
    restored   mend can restore a lost file exactly

    `tensors` is empty in three cases: the state is "restored", the part is a value that is no
    tensor, or the part is the names and shapes of all tensors.
    """

    state: Literal["restored", "elsewhere", "rebuilt", "made-up", "gone"]
    tensors: list[OfTensor]


class Part(Struct):
    """A file of an interrupted save; `size` is null if it is missing."""

    file: str
    role: str
    state: str
    size: int | None


class Interrupted(Struct):
    """The newest checkpoint of a run, if its save was interrupted.

    older      the path of the newest complete checkpoint
    tensors    the number of tensors that the interrupted checkpoint should have
    alike      how many of these `older` has with the same type and shape
    frozen     the weights counted in `alike` that training does not change

    `older` is null if no checkpoint is complete; `tensors` and `alike` are null if unknown.
    """

    name: str
    path: str
    files: list[Part]
    older: str | None
    tensors: int | None
    alike: int | None
    frozen: list[str]


class Mend(Document, kw_only=True):
    """The document that `zckpt mend --json` prints.

    `problems` lists further missing files that the engine's loader needs.
    """

    source: Json
    format: str | None
    target: str | None
    """null with --dry-run and without DST."""
    step: Step
    places: list[Restored]
    lost: list[LostPart]
    problems: list[Notice]
    warnings: list[Notice]
    dry_run: bool
    written: bool
    files: list[str]
    bytes: int
    left_out: list[Notice]
    next: str
    seconds: float
    records: Records | UnsetType = UNSET
    resumed: int | UnsetType = UNSET
    already_complete: bool | UnsetType = UNSET
    free: int | UnsetType = UNSET
    instead: str | UnsetType | None = UNSET
    interrupted: Interrupted | UnsetType | None = UNSET
    sent: int | UnsetType = UNSET
    read_back: int | UnsetType = UNSET


class Comparison(Document, kw_only=True):
    """The keys that the documents of `verify` and `diff` have in common."""

    equal: bool
    selection: list[str]
    tensors: int
    bytes: int | UnsetType = UNSET
    slots: dict[str, int] | UnsetType = UNSET
    seconds: float
    differences: list[Json]
    problems: list[Problem]
    notes: list[Problem] | UnsetType = UNSET
    records: Records | UnsetType | None = UNSET
    digests: dict[str, Json] | UnsetType = UNSET
    inferred: dict[str, list[str]] | UnsetType = UNSET
    unproven: list[Problem] | UnsetType = UNSET
    rounded: dict[str, list[str]] | UnsetType = UNSET
    lacking: list[Json] | UnsetType = UNSET
    steps: list[Json] | UnsetType = UNSET
    step_place: list[Json] | UnsetType = UNSET
    scalars: list[Json] | UnsetType = UNSET
    groups: list[Json] | UnsetType = UNSET
    states: list[Json] | UnsetType = UNSET
    not_compared: list[Notice] | UnsetType = UNSET
    only_a: list[str] | UnsetType = UNSET
    only_b: list[str] | UnsetType = UNSET
    versions: Json | UnsetType = UNSET
    advice: Notice | UnsetType = UNSET


class Verify(Comparison, kw_only=True):
    """The document that `zckpt verify --json` prints."""

    path: str
    against: str | None
    device: str
    gathered: bool
    world: int
    rank: int
    step: Step | UnsetType = UNSET
    warnings: list[Notice] | UnsetType = UNSET
    instead: str | UnsetType | None = UNSET
    """If this checkpoint is not complete: the newest complete one of the same run."""
    mend: Json | UnsetType | None = UNSET
    """What `zckpt mend` would restore of lost or unreadable files, and the command.

    Null without such files, or if `mend` cannot restore all of them without made-up values.
    """
    rebuild: Json | UnsetType | None = UNSET
    """What `zckpt mend --rebuild` would restore with made-up values, and the command.

    Null if `mend` needs no made-up values, or cannot restore the files even with them.
    """
    held: Json | UnsetType = UNSET
    names_of_reader: list[str] | UnsetType = UNSET


class Diff(Comparison, kw_only=True):
    """The document that `zckpt diff --json` prints."""

    a: str
    b: str
    first: str | None
    worst: str | None
    results: list[Json] | UnsetType = UNSET


class Stats(Document, kw_only=True):
    """The document that `zckpt stats --json` prints."""

    path: str
    format: str
    step: Step
    tensors: list[Json]
    not_computed: list[Json]
    problems: list[Fault]
    bytes: int
    records: Records
    seconds: float
    advice: Notice | UnsetType = UNSET


class ProbeDiff(Document, kw_only=True):
    """The document that `zckpt probe-diff --json` prints."""

    a: str
    b: str
    noise: str | None
    noise_floor: Number
    equal: bool
    records: int
    differing: int
    steps: list[int]
    ranks: list[int]
    circumstances: list[str]
    first: Json | None
    big: Json | None
    only_a: list[str]
    only_b: list[str]
    worlds: list[int]
    unmerged: list[Notice]
    notes: list[Notice]
    metrics: Any
    map: Any
    seconds: float | UnsetType = UNSET


class LeftAside(Struct):
    """A newer checkpoint that `auto-resume` skipped because it is not complete, and the reason."""

    path: str
    reason: Notice


class AutoResume(Document, kw_only=True):
    """The document that `zckpt auto-resume --json` prints; null if the run has no checkpoint."""

    run: str
    path: str
    checkpoint: str
    load_dir: str
    tag: str | None
    step: Step
    format: str
    sizes: dict[str, int]
    ranks_before: int | None
    unopened: int | UnsetType = UNSET
    obstacles: list[Notice]
    names: bool
    """True if `path` has empty files through which DeepSpeed loads the source (copy=False)."""
    written: bool
    bytes: int
    seconds: float
    """The seconds that writing took; 0 if nothing was written."""
    records: Records | None
    left_aside: list[LeftAside]
    removed: list[str]
    warnings: list[Notice]


class Checked(Document, kw_only=True):
    """The result of `zckpt check` for one checkpoint."""

    path: str
    format: str | None
    engine: str | None
    step: Step
    sizes: dict[str, int]
    unopened: int | UnsetType = UNSET
    loads: bool
    obstacles: list[Notice]
    warnings: list[Notice]
    fix: str | None
    refused: Notice | None


class Check(Checked, kw_only=True):
    """The document that `zckpt check --json` prints."""

    goes_on_from: Checked | UnsetType | None = UNSET


class Listed(Struct):
    """A checkpoint of a run.

    whole          no file that resuming needs is missing or damaged
    of_one_save    the files do not contradict each other
    intact         no byte is damaged; null if not all bytes were read
    loads          the engine loads it on the requested number of ranks
    sizes          the numbers of ranks that the files state
    saved          the time of the newest file
    unread         damage in files that resuming does not read
    weights_alone  it was saved without an optimizer, so no run can resume from it

    `whole`, `of_one_save`, `intact` and `loads` are null if unknown or not requested.
    """

    name: str
    path: str
    step: Step
    format: str | None
    version: str | None
    zero_stage: int | None
    sizes: dict[str, int]
    saved: str | None
    being_written: bool
    files: int
    bytes: int
    whole: bool | None
    of_one_save: bool | None
    intact: bool | None
    loads: bool | None
    weights_alone: bool
    problems: list[Notice]
    unread: list[Notice]
    obstacles: list[Notice]
    warnings: list[Notice]


class List(Document, kw_only=True):
    """The document that `zckpt list --json` prints; the oldest checkpoint is the first."""

    run: str
    sizes: dict[str, int]
    checkpoints: list[Listed]
    interrupted: Interrupted | None
    seconds: float


class Page(Document, kw_only=True):
    """The document that `zckpt report --json` prints; docs/report.md describes its sections.

    `about` has facts from the trainer's files beside the checkpoint. `next` lists commands for this
    checkpoint. `layers` has the names of the rows in tables that have one row per layer.
    """

    path: str
    version: str
    line: Json
    about: Json
    next: Json
    layers: dict[str, str] | UnsetType = UNSET
    faults: list[Fault]
    seconds: float
    tensors: Json | UnsetType = UNSET
    numbers: Json | UnsetType | None = UNSET
    map: Json | UnsetType = UNSET
    masters: Json | UnsetType | None = UNSET
    steps: Json | UnsetType = UNSET
    against: Json | UnsetType = UNSET
    run: Json | UnsetType = UNSET


class CleanUp(Document, kw_only=True):
    """The document that `zckpt clean-up --json` prints."""

    path: str
    files: list[str]
    uploads: list[str]
    other_uploads: list[Json]
    bytes: int
    dry_run: bool


class Formats(Document, kw_only=True):
    """The document that `zckpt formats --json` prints."""

    formats: list[Json]


class Progress(Document, kw_only=True):
    """A line of `--json --progress` on stderr; `command` names the command.

    event           "begin" in the first line
    about           the command and its paths
    seconds         the time since the command began
    done, total     bytes; `total` is null until it is known
    seconds_left    null until bytes have been moved
    doing           the current file or tensor

    A command may read the bytes several times: `done` begins at 0 each time.
    """

    event: Literal["begin", "progress"]
    about: str
    host: str
    process: int
    seconds: float
    done: int
    total: int | None
    bytes_per_second: float
    seconds_left: float | None
    doing: str


DOCUMENTS: dict[str, type[Document]] = {
    "inspect": Inspect,
    **dict.fromkeys(("convert", "reshard", "export"), Conversion),
    "mend": Mend,
    "verify": Verify,
    "diff": Diff,
    "stats": Stats,
    "probe-diff": ProbeDiff,
    "auto-resume": AutoResume,
    "check": Check,
    "list": List,
    "report": Page,
    "clean-up": CleanUp,
    "formats": Formats,
    "progress": Progress,
}
"""Maps a command to the type of the JSON that it prints with `--json`.

`progress` is no command: its type is that of a line which `--progress` prints.
"""


OF_SEVERAL = ("inspect", "verify", "check")
"""The commands that accept several PATHs."""


def schema(command: str) -> Json:
    """The JSON Schema (2020-12) of a command's `--json` output, errors included.

    For "progress": the schema of each line of `--progress`. Raises WrongOption if the command has
    no JSON output.
    """
    if command not in DOCUMENTS:
        raise WrongOption(
            "option-names-nothing",
            f"{command} prints no JSON",
            hint=meant(command, DOCUMENTS) or f"these do: {', '.join(DOCUMENTS)}",
        )
    kinds: list[Any] = [DOCUMENTS[command]]
    if command != "progress":
        kinds.append(Error)
    if command == "auto-resume":
        kinds.append(None)
    if command in OF_SEVERAL:
        kinds.append(Reports)
    either, parts = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    if command in OF_SEVERAL:  # a list of two kinds, which msgspec has no type for
        parts["Reports"]["properties"]["reports"]["items"] = {"anyOf": list(either[:2])}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"zckpt {'COMMAND --progress' if command == 'progress' else command} --json",
        "anyOf": list(either),
        "$defs": parts,
    }
