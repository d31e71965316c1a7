"""Which room may import which: the arrows of the house, and no circle.

A room is a module or a folder directly in `zckpt/`, or `benchmarks`. An arrow joins two rooms, one
of which imports the other. A new arrow fails here: draw it only if the design needs it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from itertools import takewhile
from pathlib import Path

import pytest

from .conftest import ROOT, needs

ARROWS = {
    "core": "errors",
    "files": "core errors",
    "copying": "core errors",
    "naming": "core errors training",
    "training": "core errors",
    "formats": "core errors files naming training",
    "judging": "core errors formats training",
    "reading": "core errors formats naming training",
    "writing": "copying core errors formats judging naming reading training",
    "proof": "core errors",
    "mending": "copying core errors files formats judging proof reading",
    "proving": "core errors formats judging proof reading",
    "remote": "core errors",
    "api": "copying core formats judging mending proof proving reading remote training writing",
    "processes": "copying core errors",
    "loading": "api copying core errors processes",
    "resume": "api core errors formats judging loading processes",
    "deepspeed": "errors loading resume",
    "dcp": "core errors files formats judging naming reading remote training",
    "probe": "core errors formats judging naming reading training",
    "display": "core errors",
    "reporting": "api core errors judging proof resume",
    "cli": "api core display errors formats judging probe processes reading remote reporting "
    "resume training",
    "__init__": "api core dcp deepspeed errors probe processes reporting resume",
    "__main__": "cli",
    "benchmarks": "api core dcp deepspeed formats probe proof resume",
}
ENGINES = re.compile(
    r"deepspeed|fsdp|megatron|onnx|\bort\b|accelerate|lightning|hugging.?face|transformers|\bpeft\b",
    re.IGNORECASE,
)
KEYS = re.compile(
    r"(model|optim)_states|(zero_pp|mp|expp)_rank|random_ltd|data_sampler|param_shapes|flat_group"
    r"|ds_(config|version)|global_(step|sample)|\blatest\b|distcp|(hf_|\.)metadata"
    r"|trainer_state|rng_state|random_states|(pytorch|adapter)_model|common\.pt|\biter_\d"
    r"|param_groups|layer_\d|\.(pth?|bin|safetensors|hdf5)\b"
)
"""Keys and names of files that engines write."""
SHARED = {"deepspeed_states", "statedict"}  # folders that formats of one family share


def modules() -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Every module of the package and of the benchmarks, with its dotted name."""
    for folder in ("zckpt", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield path, parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts


def imports(path: Path, name: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The modules of zckpt that a module imports, at its top or inside functions."""
    package = name if path.name == "__init__.py" and name[-1] != "__init__" else name[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            if base[:1] == ("zckpt",):
                yield from ((*base, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "zckpt":
                    yield (*alias.name.split("."), "*")


def room(name: tuple[str, ...]) -> str:
    """The room of a dotted name; a name that is no module is one of `zckpt/__init__.py`."""
    if name[0] == "benchmarks":
        return "benchmarks"
    path = ROOT / "zckpt" / name[1]
    return name[1] if path.is_dir() or path.with_suffix(".py").is_file() else "__init__"


@pytest.fixture(scope="module")
def arrows() -> dict[str, set[str]]:
    drawn: dict[str, set[str]] = {}
    for path, name in modules():
        for imported in imports(path, name):
            if room(imported) != room(name):
                drawn.setdefault(room(name), set()).add(room(imported))
    return drawn


def test_no_arrow_is_new(arrows: dict[str, set[str]]) -> None:
    allowed = {(start, end) for start, ends in ARROWS.items() for end in ends.split()}
    drawn = {(start, end) for start, ends in arrows.items() for end in ends}
    print(f"{len(drawn)} arrows between rooms")
    assert drawn - allowed == set(), "new arrows"
    assert allowed - drawn == set(), "arrows that are no longer needed"
    assert len(drawn) <= 135


def test_no_circle_of_rooms(arrows: dict[str, set[str]]) -> None:
    order = list(TopologicalSorter(arrows).static_order())
    assert order.index("core") < order.index("formats") < order.index("cli")


def test_floors(arrows: dict[str, set[str]]) -> None:
    """A room stands one floor above the highest room that it imports."""
    floors: dict[str, int] = {}
    for name in TopologicalSorter(arrows).static_order():
        floors[name] = 1 + max((floors[below] for below in arrows.get(name, ())), default=0)
    assert max(floors.values()) <= 13


def test_no_circle_of_files() -> None:
    """Imports inside functions and for the type checker count."""
    names = {".".join(name) for _, name in modules()}
    drawn: dict[str, set[str]] = {}
    for path, name in modules():
        ends = {
            next(end for end in (".".join(own), ".".join(own[:-1]), "") if end in names or not end)
            for own in imports(path, name)
        }
        drawn[".".join(name)] = ends - {"", ".".join(name)}
    assert len(list(TopologicalSorter(drawn).static_order())) > 300


def test_no_format_imports_another() -> None:
    for path, name in modules():
        if name[:2] != ("zckpt", "formats") or len(name) < 4:
            continue
        for imported in imports(path, name):
            in_formats = imported[:2] == ("zckpt", "formats") and len(imported) > 3
            if in_formats and (ROOT / "zckpt" / "formats" / imported[2]).is_dir():
                assert imported[2] in {name[2], *SHARED}, f"{path} imports {'.'.join(imported)}"


FLOORS = {
    "dcp": "hf options rest | files | gather items read write | functions",
    "deepspeed": "layer_names flats older_model optimizer_files run_template sequence_ranks "
    "| files | ranks model_ranks moe | stage_0 | ep_optimizers gather weights | read "
    "| target_ranks | write | functions",
    "deepspeed/gather": "model_rank tensor | grid",
    "deepspeed/model_ranks": "pipeline stage_bounds target_slices tensor_ranks | target_stages",
    "deepspeed/moe": "auto_ep regroup | experts",
    "deepspeed/stage_0": "samples | numbers | naming | optimizer | stages",
    "deepspeed_states": "directories module_names options schedulers | experts states "
    "| agreement engine estimates tensors | hyper of_files | manifest target "
    "| model_files optimizer_values reports",
    "deepspeed_universal": "files | slicing | merged write | read | functions",
    "gathered": "sharded_tensors | items rank_trees | averages files zero_redundancy | gather read "
    "| write | write_ranks | functions",
    "hf": "options read | write | functions",
    "megatron": "common_state names saving_program | files fsdp2 groups masters "
    "| gather manifest optimizers | buffers fsdp vocabulary | legacy run_template | read write "
    "| functions",
    "megatron/buffers": "order placing | stages | flats",
    "megatron/gather": "rule | folders | items",
    "megatron/legacy": "cuts ranks | directories",
    "onnxruntime": "ranks | hdf5 legacy | files partition | gather read write | functions",
    "statedict": "gather matching own_facts tree | equal_tensors keys weights | state_dict_search "
    "write | names | roots | building refusals | slices | read",
    "universal": "agreement files | flipped read | write | functions",
}
"""The modules and folders inside of each format's folders, the lowest floor first."""


def test_no_arrow_runs_uphill_inside_of_a_format() -> None:
    """Each imports only those of lower floors; a folder is one of them, with all that is in it."""
    formats = ROOT / "zckpt" / "formats"
    floors = {}
    for folder, text in FLOORS.items():
        stated = [floor.split() for floor in text.split("|")]
        floors[folder] = {name: number for number, floor in enumerate(stated) for name in floor}
        pages = (formats / folder).glob("*.py"), (formats / folder).glob("*/__init__.py")
        found = {path.stem for path in pages[0]} | {path.parent.name for path in pages[1]}
        assert floors[folder].keys() == found - {"__init__"}, folder
    drawn = set()
    for path, name in modules():
        for imported in imports(path, name):
            shared = takewhile(lambda pair: pair[0] == pair[1], zip(name, imported, strict=False))
            depth = sum(1 for _ in shared)
            if depth < 3 or name[:2] != ("zckpt", "formats"):
                continue  # of another folder
            floor = floors["/".join(name[2:depth])]
            start, end = name[depth:][:1], imported[depth]  # nothing: the folder's own page
            assert end in floor, f"{path} imports {'.'.join(imported)} from the page of its folder"
            assert not start or floor[end] < floor[start[0]], f"{path} imports {end}: uphill"
            drawn.add((name[2:depth], start, end))
    print(f"{len(drawn)} arrows inside of formats")
    assert len(drawn) <= 287


CORE = ("version", "grouping", "storage", "checkpoint", "ranks", "passes", "comparison")
"""What is directly in `core/`: each imports only from those before it."""


def test_no_arrow_runs_uphill_inside_of_core() -> None:
    folder = ROOT / "zckpt" / "core"
    found = {path.stem for path in folder.iterdir() if path.name[0] != "_"}
    assert found == {*CORE}
    drawn = set()
    for path, name in modules():
        for imported in imports(path, name):
            start, end = name[2:3], imported[2:3]
            if name[:2] == imported[:2] == ("zckpt", "core") and start != end:
                assert CORE.index(end[0]) < CORE.index(start[0]), f"{path} imports {end[0]}"
                drawn.add((start, end))
    assert ("comparison",) in {start for start, _ in drawn}


PARSERS = {
    ("dcp", "files"),
    ("deepspeed", "stage_0", "samples"),
    ("deepspeed_states", "module_names"),
    ("gathered", "files"),
    ("megatron", "files"),
    ("megatron", "saving_program"),
    *(("onnxruntime", name) for name in ("files", "hdf5", "legacy", "ranks")),
}
"""Modules of formats that say what stands in files, and not what a piece of it means."""
JOINS = {"agreement", "merge", "placement", "split"}  # of core


def test_a_proof_shares_only_parsers_with_the_reader() -> None:
    """What `verify --gather` joins must not be joined by the reader's rule."""

    def gathers(name: tuple[str, ...]) -> bool:
        return any(part == "gather" or part.startswith("gather_") for part in name)

    seen = set()
    for path, name in modules():
        if name[:2] != ("zckpt", "formats") or not gathers(name):
            continue
        for imported in imports(path, name):
            assert JOINS.isdisjoint(imported), f"{path} imports {'.'.join(imported)}"
            if imported[:2] == ("zckpt", "formats") and not gathers(imported):
                (parser,) = [item for item in PARSERS if imported[2 : 2 + len(item)] == item] or [
                    ()
                ]
                assert parser, f"{path} imports {'.'.join(imported)}"
                seen.add(parser)
    assert seen == PARSERS


@pytest.mark.parametrize("folder", ["core", "copying", "files"])
def test_code_names_no_engine(folder: str) -> None:
    """Docstrings and comments may say where a fact is from; names and texts of the code may not.

    Nor do they have keys and file names of engines, except those of a container in `files/`.
    """
    words_of_engines = [ENGINES] if folder == "files" else [ENGINES, KEYS]
    for path in (ROOT / "zckpt" / folder).rglob("*.py"):
        tree = ast.parse(path.read_text())
        prose = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        prose |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            words = [
                getattr(node, field, None)
                for field in ("id", "attr", "name", "arg", "module", "value")
                if id(node) not in prose
            ]
            for word in words:
                if isinstance(word, str):
                    found = any(engine.search(word) for engine in words_of_engines)
                    assert not found, f"{path}:{node.lineno} names {word!r}"


# slow, large (hashlib loads OpenSSL: 3.5 MiB), or not needed for every report
LATE = {"torch", "numpy", "h5py", "ml_dtypes", "rich", "hashlib"}
OF_TORCH = (
    *(("zckpt", "probe"), ("zckpt", "dcp"), ("zckpt", "deepspeed"), ("zckpt", "loading")),
    ("zckpt", "proof", "allgather"),
)


def at_the_top(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """What runs when a module is imported; not what the type checker alone sees."""
    for node in body:
        yield node
        if isinstance(node, ast.Try):
            yield from at_the_top(node.body)
        elif isinstance(node, ast.If) and ast.unparse(node.test) != "TYPE_CHECKING":
            yield from at_the_top([*node.body, *node.orelse])


def test_slow_packages_are_imported_late() -> None:
    """At the top of a module only in the rooms that work inside a program of torch."""
    for path, name in modules():
        if name[0] == "benchmarks" or any(name[: len(room)] == room for room in OF_TORCH):
            continue
        for node in at_the_top(ast.parse(path.read_text()).body):
            if isinstance(node, ast.Import):
                tops = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                tops = {(node.module or "").partition(".")[0]}
            else:
                continue
            assert not tops & LATE, f"{path}:{node.lineno}: import it in the function that uses it"


SENDS_PICKLES = re.compile(r"(all_gather|broadcast|scatter|gather|send|recv)_object.*")


def test_no_process_unpickles_what_another_one_sends() -> None:
    """`all_gather_object` and its relatives pickle: what processes tell each other is plain."""
    for path, _ in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [
                getattr(node, "attr", ""),
                *(a.name for a in getattr(node, "names", ()) if isinstance(a, ast.alias)),
            ]
            assert not any(map(SENDS_PICKLES.fullmatch, names)), f"{path}:{node.lineno}: {names}"


HIDING = {"walk", "access", "open", "pread", "isfile", "isdir", "exists", "getsize"}
TARGETS = re.compile(r"write|.*shell|options")  # modules that work on files of a target


@pytest.mark.parametrize("folder", ["files", "formats", "training", "proof"])
def test_sources_are_opened_in_one_place(folder: str) -> None:
    """Errors of `core/storage/sources.py` name the file; these functions would hide some."""
    for path in (ROOT / "zckpt" / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or TARGETS.fullmatch(path.stem):
                continue
            called = ast.unparse(node.func)
            hides = called == "open" or (
                called.startswith("os.") and called.split(".")[-1] in HIDING
            )
            assert not hides, f"{path}:{node.lineno} calls {called}: use core/storage/sources.py"


def test_long_modules_say_why() -> None:
    for path, _ in modules():
        lines = path.read_text().splitlines()
        if len(lines) > 600:
            assert "Over 600 lines" in "\n".join(lines[:12]), f"{path} has {len(lines)} lines"


def test_docstrings_of_functions_are_short() -> None:
    """Tables (indented lines) do not count, and rooms that users read may say more."""
    for path, name in modules():
        if name[1:2] in {("api",), ("cli",), ("dcp",), ("deepspeed",), ("probe",)}:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                lines = (ast.get_docstring(node) or "").splitlines()
                prose = "\n".join(line for line in lines if not line.startswith("    "))
                assert len(prose) <= 600, f"{path}:{node.lineno} {node.name} has {len(prose)}"


def test_front_pages_name_their_modules() -> None:
    """A room's docstring is its map: it has every module of the folder."""
    for page in sorted((ROOT / "zckpt").rglob("*/__init__.py")):
        text = ast.get_docstring(ast.parse(page.read_text())) or ""
        modules_named = set(re.findall(r"\b\w+\.py\b", text))
        lacking = {path.name for path in page.parent.glob("*.py")} - modules_named - {page.name}
        assert not lacking, f"{page} does not name {', '.join(sorted(lacking))}"


def test_records_that_are_read_have_types_and_no_texts_as_annotations() -> None:
    """msgspec evaluates texts when it first reads a record: reading a file would run `eval`."""
    reads = re.compile(r"^from msgspec.* import .*\b(convert|decode|fields|json|msgpack)\b", re.M)
    evaluated = [
        str(path)
        for path, _ in modules()
        if reads.search(text := path.read_text())
        and re.search(r"^class \w+\(Struct\b", text, re.M)
        and "from __future__ import annotations" in text
    ]
    assert evaluated == []


def test_a_missing_package_skips_a_test_only_outside_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="needs no_such_package"):
        needs("pytest", "no_such_package")
    monkeypatch.setenv("CI", "true")
    needs("no_such_package")
    skipping = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if re.search(r"\bimportorskip\(", path.read_text())
    ]
    assert skipping == []


SHOW = ("cli", "display", "errors", "notices")  # what shows sentences; reporting/page too
READS_TEXTS = {
    "core/passes/description.py": 2,  # a proof of version 1 has texts
    "dcp/source.py": 2,
    "dcp/target.py": 1,
    "files/dcpfile.py": 1,
    "files/hdf5file.py": 1,  # h5py's, which has the number of an OSError in its text alone
    "files/torchfile.py": 1,
    "formats/deepspeed/stage_0/stages.py": 1,
    "formats/deepspeed_universal/merged.py": 1,
    "formats/megatron/run_template.py": 1,
    "formats/statedict/read.py": 1,
    "formats/universal/write.py": 3,  # a manifest keeps texts
    "judging/contents.py": 1,
    "judging/damaged_source.py": 1,
    "naming/tensor_rules.py": 1,
    "processes/group.py": 1,
    "processes/store.py": 1,  # torch's, which has a stack
    "proving.py": 1,
    "remote/url_arguments.py": 1,
    "remote/failures.py": 1,  # obstore's, whose classes do not say what failed
    "remote/upload.py": 1,
    "reporting/faults.py": 2,  # a page has each sentence once
    "reporting/document.py": 1,
    "reporting/run.py": 1,
    "resume/auto.py": 3,
    "resume/resuming.py": 4,
    "writing/models.py": 2,
}
"""Modules that touch the sentence of an error or a notice, and how often: to store it, to send it
to another process, or to say it again with the name of a file. This list only gets shorter."""


def texts_read(tree: ast.Module) -> Iterator[ast.AST]:
    """Where a module touches the sentence or the hint of an error, a notice or a report's line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            place = ast.unparse(node.value)  # in capitals: a known fault, of a table
            if node.attr in ("message", "hint") and place != "self" and not place.isupper():
                yield node
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            if isinstance(node.slice, ast.Constant) and node.slice.value in ("message", "hint"):
                yield node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            says = node.func.id == "str" and node.args and ast.unparse(node.args[0]) == "error"
            if says or node.func.id == "sentence":
                yield node


def test_no_room_decides_by_a_text() -> None:
    """Rooms compare codes and fields; a few pass a sentence on."""
    found = {}
    for path, name in modules():
        if name[0] != "zckpt" or name[1] in SHOW or name[1:3] == ("reporting", "page"):
            continue
        if count := len([*texts_read(ast.parse(path.read_text()))]):
            found["/".join(path.relative_to(ROOT / "zckpt").parts)] = count
    assert found == READS_TEXTS
