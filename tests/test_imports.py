"""Who may import whom: downwards only, cores without clocks or sockets, and nothing that runs what it loads."""

from __future__ import annotations

import ast
import graphlib
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from peerd.cli.main import VERBS

TESTS = Path(__file__).parent
ROOT = TESTS.parent
FOLDERS = {"peerd": ROOT / "peerd", **{f"peerd.{name}": ROOT / name for name in ("transport", "training", "cli")}}

CORES = {
    "peerd.transport.errors", "peerd.transport.ids", "peerd.transport.admission", "peerd.transport.framing",
    "peerd.transport.wire", "peerd.transport.patience", "peerd.transport.peer_queue", "peerd.transport.secure.records",
    "peerd.transport.secure.signing", "peerd.training.effects",
    "peerd.training.mode", "peerd.training.mode_core", "peerd.training.mode_settings", "peerd.training.early",
    "peerd.training.batch_sizes", "peerd.training.counts", "peerd.training.plain_numbers",
    "peerd.training.flush", "peerd.training.refusal", "peerd.training.room",
    "peerd.training.sample", "peerd.training.scratch", "peerd.training.sketch",
    "peerd.training.partnered", "peerd.training.trigger", "peerd.training.trigger_check",
    "peerd.training.model.over", "peerd.training.model.quiet",
    "peerd.training.model.variances", "peerd.protocol.plan", "peerd.security.token",
    "peerd.security.keyring", "peerd.security.revocations", "peerd.security.statements",
    "peerd.security.succession", "peerd.relay.envelope",
}  # fmt: skip
CORE_PACKAGES = (
    "peerd.membership", "peerd.node", "peerd.transport.messages", "peerd.training.codecs", "peerd.training.kernels",
    "peerd.training.modes",
    "peerd.training.one_way", "peerd.training.pairs", "peerd.training.parameter_server", "peerd.training.rounds",
)  # fmt: skip
SHELLS = {f"peerd.daemon.{name}" for name in (
    "acceptor", "catch_up", "compute_thread", "control", "known_members",
    "main", "meetings", "membership_service", "metrics",
    "mode_runner", "node", "offences", "peers", "plan_follower", "supervisor", "trainer_service", "trainer_session",
    "twin_proof", "verbs",
)} | {f"peerd.security.{name}" for name in (
    "entry", "newcomer", "reception", "renewal", "secrets_exchange", "shared_secrets",
)} | {
    "peerd.relay.guest", "peerd.relay.lease", "peerd.relay.lender", "peerd.relay.lossy_socket", "peerd.relay.streams",
    "peerd.doctor", "peerd.process.descriptors", "peerd.process.look_up", "peerd.process.own_address",
    "peerd.process.threads", "peerd.reproduce.sockets.rank", "peerd.reproduce.sockets.without_trainer",
}  # fmt: skip
SHELL_PACKAGES = ("peerd.carriers", "peerd.transport", "peerd.cli")
ROOMS = {  # each with the rooms that it may look into; from the roof to the cellar
    "cli": {
        "peerd", "doctor", "settings", "carriers", "daemon", "reproduce", "simulation", "trainer", "local", "process",
        "protocol", "tasks", "modes", "mode", "security", "transport",
    },
    "doctor": {"peerd", "settings", "carriers", "security", "local", "process", "kernels", "transport"},
    "reproduce": {
        "peerd", "simulation", "daemon", "node", "local", "process", "modes", "model", "pairs", "rounds", "codecs",
        "mode", "messages", "transport",
    },
    "simulation": {
        "node", "membership", "modes", "pairs", "parameter_server", "model", "codecs", "mode", "tasks", "messages",
        "transport",
    },
    "tasks": {"peerd", "mode", "transport"},  # scripts like any user's
    "daemon": {
        "peerd", "settings", "carriers", "security", "relay", "node", "membership", "local", "process", "protocol",
        "tasks", "modes", "codecs", "kernels", "mode", "messages", "transport",
    },
    "trainer": {"local", "process", "protocol", "model", "transport"},
    "settings": {"messages", "security", "carriers", "protocol", "modes", "mode", "transport"},
    "carriers": {"process", "transport", "rdma"},
    "process": {"mode", "modes", "transport"},
    "node": {"local", "protocol", "model", "kernels", "mode", "messages", "transport"},  # daemon and simulation run it
    "protocol": {"messages", "transport"},
    "membership": {"mode", "messages", "transport"},
    "security": {"local", "process", "messages", "transport"},
    "relay": {"process", "messages", "transport"},
    "local": {"messages", "model", "transport"},
    "modes": {
        "one_way", "pairs", "parameter_server", "rounds", "codecs", "kernels", "mode", "model", "messages", "transport",
    },
    "one_way": {"codecs", "kernels", "mode", "model", "messages", "transport"},
    "pairs": {"codecs", "kernels", "mode", "messages", "transport"},
    "parameter_server": {"model", "codecs", "kernels", "mode", "messages", "transport"},
    "rounds": {"codecs", "kernels", "mode", "messages", "transport"},
    "model": {"kernels"},
    "mode": {"codecs", "kernels", "messages", "model", "transport"},
    "codecs": {"kernels", "mode", "messages", "transport"},
    "kernels": set(),
    "rdma": {"messages", "transport"},
    "transport": {"messages"},
    "messages": set(),
}  # fmt: skip
FILES_MAX = 22  # in a folder
NOT_IN_CORES = {
    "trio",
    "asyncio",
    "socket",
    "select",
    "selectors",
    "ssl",
    "time",
    "datetime",
    "threading",
    "subprocess",
}
UNSAFE_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
INTERFACES = {"peerd.local.board", "peerd.local.shared_memory"}  # arrays


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of ours, by the name under which it is imported."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            if package == "peerd" and path.relative_to(folder).parts[0] in ("transport", "training", "cli"):
                continue  # symbolic links to the other three
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join([package, *parts]).removesuffix(".__init__")
            found[name] = ast.parse(path.read_text(), path)
    return found


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def walk(node: ast.AST, *, lazy: bool) -> Iterator[ast.AST]:
    """Everything that runs; `lazy` also inside functions."""
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child) or (not lazy and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)):
            continue
        yield child
        yield from walk(child, lazy=lazy)


def imports(name: str, *, lazy: bool = True) -> set[str]:
    """Absolute names of the modules that a module imports."""
    found = set()
    for node in walk(modules()[name], lazy=lazy):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: a relative import"
            module = node.module or ""
            inner = {f"{module}.{alias.name}" for alias in node.names} & modules().keys()
            found |= inner
            if len(inner) < len(node.names):
                found.add(module)
    return found


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def is_core(name: str) -> bool:
    return name in CORES or within(name, CORE_PACKAGES)


@cache
def all_imports() -> dict[str, set[str]]:
    """What each module imports, by its name."""
    return {name: imports(name) for name in sorted(modules())}


def of(package: str) -> dict[str, set[str]]:
    """The modules of a package, with what they import."""
    return {name: imported for name, imported in all_imports().items() if within(name, (package,))}


def test_the_lists_name_modules_that_exist() -> None:
    assert not (CORES | SHELLS) - modules().keys()
    assert not CORES & SHELLS


def floor(name: str) -> int:
    """Of the house: transport is the ground floor."""
    parts = name.split(".")
    top = parts[1] if len(parts) > 1 and parts[1] in ("transport", "training", "cli") else "peerd"
    return ("transport", "training", "peerd", "cli").index(top)


def room(name: str) -> str:
    """Where a module is: the name of its folder; what lies beside training's folders is the contract of a mode."""
    parts = name.split(".")
    if parts[:2] == ["peerd", "training"]:
        return parts[2] if len(parts) > 2 and parts[2] in ROOMS else "mode"
    if parts[:2] == ["peerd", "transport"]:
        return parts[2] if len(parts) > 2 and parts[2] in ROOMS else "transport"
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else "peerd"


def test_nobody_looks_up() -> None:
    for name, imported in all_imports().items():
        if not within(name, ("peerd.training.tasks",)):  # a task is a user's script: it attaches
            ours = {one for one in imported if within(one, ("peerd",)) and one != "peerd"}
            assert not {one for one in ours if floor(one) > floor(name)}, name


def test_rooms_have_the_arrows_that_are_drawn_here() -> None:
    found: dict[str, set[str]] = {name: set() for name in ROOMS}
    for name, imported in all_imports().items():
        for one in imported & modules().keys():
            if room(one) != room(name) and room(name) in ROOMS:
                found[room(name)].add(room(one))
    assert found == ROOMS


OLD_WORDS: dict[str, tuple[str, ...]] = dict.fromkeys(
    (
        "adopt", "beside", "bid", "bidder", "branches", "bury", "claimant", "decider", "deciding", "feel", "keeper",
        "lane", "lanes", "meet", "noted", "outbox", "purse", "reign", "replica", "seat", "serves", "spoilt", "squeeze",
        "squeezer", "storm", "surroundings", "trainee", "widen",
    ), (),
) | {
    "about": (
        "peerd.trainer",  # what is about to happen to a model
        "peerd.simulation.trainer",  # what members say of its node; NodeMeta everywhere else
    ),
    "claim": ("peerd.membership", "peerd.reproduce"),  # what a node signs of itself; what a paper says
    "facts": (  # of TrainerSession, the trainer's status
        "peerd.daemon.trainer_session", "peerd.daemon.trainer_service", "peerd.daemon.mode_runner",
    ),
    "half": (
        "peerd.training.modes", "peerd.training.pairs", "peerd.transport.messages", "peerd.simulation.checkers",
        # of an exchange; and in plain English, of what is counted:
        "peerd.training.flush", "peerd.reproduce.statistics",
        # and of the memory for corrections, in the messages of trainer and daemon:
        "peerd.protocol.trainer", "peerd.daemon.trainer_service", "peerd.trainer.session",
    ),
    "hand_over": ("peerd.simulation.connections",),  # what a connection gives its target
    "handed_over": ("peerd.simulation.connections",),
    "heed": ("peerd.training.modes", "peerd.cli"),  # whether a mode has a use for a setting
    "link": (  # what two partners remember, and what is told of it
        "peerd.training", "peerd.transport.messages.pairs", "peerd.transport.messages.one_way", "peerd.simulation",
        "peerd.process.host_memory", "peerd.daemon.verbs", "peerd.daemon.plan_follower",
        "peerd.reproduce.sockets.rank", "peerd.reproduce.controls.unpacked",
        "peerd.cli.status",
    ),
    "shard": (
        "peerd.training.parameter_server", "peerd.training.modes.parameter_server",
        "peerd.transport.messages.parameter_server",  # what one server holds of the parameters
        "peerd.training.model", "peerd.trainer",  # what one rank holds of a DTensor
        "peerd.training.tasks", "peerd.simulation.options", "peerd.simulation.scenario", "peerd.cli.demo",
        "peerd.cli.simulate", "peerd.reproduce.e05_trigger", "peerd.reproduce.e05b_fixed_period",  # the flag --shard
    ),
    "shell": ("peerd.simulation.trainer",),  # the protocols of a simulated node
    "watched": ("peerd.simulation.node_model", "peerd.simulation.checkers"),
    "weather": ("peerd.simulation.world", "peerd.simulation.swarm"),  # the fault's name, and its name in traces
}  # fmt: skip
"""Words that had two meanings, or none that the field knows, and where one meaning of them is left."""
OLD_CLASSES = {"End", "Exchanges", "Look", "ModelSide", "SwarmView", "Word"}  # in other names their words are plain
ENDS_OF_CONNECTIONS = "peerd.simulation.connections", "End"
BOUNDS = ("MAX_", "MIN_"), ("_MOST", "_LEAST")  # a bound's name ends in _MAX or _MIN, and then its unit


def identifiers(module: ast.Module) -> set[str]:
    """Whatever it gives a name to, or calls by one."""
    nodes = [node for node in ast.walk(module) if not isinstance(node, ast.alias)]
    found = {getattr(node, field, None) for node in nodes for field in ("id", "attr", "arg", "name", "rest")}
    return {name for name in found if isinstance(name, str)}


@cache
def words_of(identifier: str) -> frozenset[str]:
    """Split at `_` and at capitals, in lower case; pairs of neighbours; plurals as singulars, too."""
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)]
    singulars = {word.removesuffix(end) for word in words for end in ("s", "es")}
    return frozenset({*words, *map("_".join, itertools.pairwise(words)), *singulars})


def test_words_are_split_at_underscores_and_capitals() -> None:
    assert words_of("_on_ShardLeader") == {"on", "shard", "leader", "on_shard", "shard_leader"}
    assert words_of("KEPT_BESIDE") == {"kept", "beside", "kept_beside"}
    assert words_of("HTTPSeats2") == {"http", "seats", "seat", "http_seats"}


def test_one_word_has_one_meaning() -> None:
    used = {
        (word, name)
        for name, module in modules().items()
        for identifier in {*identifiers(module), *name.split(".")}
        for word in words_of(identifier) & OLD_WORDS.keys()
    }
    assert not {(word, name) for word, name in used if not within(name, OLD_WORDS[word])}
    allowed = {(word, place) for word, places in OLD_WORDS.items() for place in places}
    assert not {
        (word, place) for word, place in allowed if not any(word == at[0] and within(at[1], (place,)) for at in used)
    }


def test_classes_and_bounds_have_the_names_of_today() -> None:
    for name, module in modules().items():
        classes = {(name, node.name) for node in ast.walk(module) if isinstance(node, ast.ClassDef)}
        assert not {one for one in classes if one[1].strip("_") in OLD_CLASSES} - {ENDS_OF_CONNECTIONS}
        numbers = {word.strip("_") for word in identifiers(module) if word.isupper()}
        assert not {word for word in numbers if word.startswith(BOUNDS[0]) or word.endswith(BOUNDS[1])}, name


def test_no_folder_is_a_heap() -> None:
    folders = {path.parent for folder in [*FOLDERS.values(), TESTS] for path in folder.rglob("*.py")}
    assert not {str(folder) for folder in folders if len(list(folder.glob("*.py"))) > FILES_MAX}


def test_tests_lie_as_what_they_test() -> None:
    """In folders of the product's names, so that who reads one finds the other."""
    tops = [name.removeprefix("peerd.") for name in FOLDERS]
    folders = {path.parent.relative_to(TESTS) for top in tops for path in (TESTS / top).rglob("*.py")}
    assert not {str(folder) for folder in folders if not (ROOT / folder).is_dir()}


def test_only_the_command_line_imports_itself_the_daemon_and_the_trainer() -> None:
    tops = {"peerd.daemon.main", "peerd.trainer.swarm"}
    below = {name: imported for name, imported in all_imports().items() if not within(name, ("peerd.cli",))}
    assert not {name for name, imported in below.items() if imported & tops}
    assert not {name for name, imported in below.items() if any(within(one, ("peerd.cli",)) for one in imported)}


def test_the_simulator_runs_without_a_shell() -> None:
    """Whatever it imports, and whatever that imports, only decides: no trio is at the end of it."""
    reached: dict[str, str] = {}
    todo = [(name, "") for name in modules() if within(name, ("peerd.simulation",))]
    while todo:
        name, by = todo.pop()
        if name not in reached:
            reached[name] = by
            todo += [(one, name) for one in all_imports()[name] & modules().keys()]
    assert not {name: by for name, by in reached.items() if "trio" in all_imports()[name]}


def test_imports_have_a_direction() -> None:
    graph = {name: imports(name, lazy=False) & modules().keys() - {name} for name in modules()}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError with the cycle


def test_only_shells_import_trio() -> None:
    users = {name for name, imported in all_imports().items() if "trio" in imported}
    assert not {name for name in users if is_core(name)}
    assert not {name for name in users if name not in SHELLS and not within(name, SHELL_PACKAGES)}


def test_cores_have_no_clock_socket_or_thread() -> None:
    for name, imported in all_imports().items():
        if is_core(name):
            assert not {one.split(".")[0] for one in imported} & NOT_IN_CORES, name
            ours = {one for one in imported if within(one, ("peerd",))}
            assert not {one for one in ours if not is_core(one) and one not in INTERFACES}, name


def test_cores_are_given_their_randomness() -> None:
    for name in filter(is_core, all_imports()):
        assert not all_imports()[name] & {"secrets", "uuid", "numpy.random"}, name
        for node in walk(modules()[name], lazy=True):
            if isinstance(node, ast.ImportFrom) and node.module == "random":
                assert [alias.name for alias in node.names] == ["Random"], name
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used = f"{node.value.id}.{node.attr}"
                assert used not in ("np.random", "os.urandom"), f"{name}:{node.lineno}"
                assert node.value.id != "random" or node.attr == "Random", f"{name}:{node.lineno} {used}"


def test_nothing_that_is_loaded_runs() -> None:
    for name, imported in all_imports().items():
        assert not {one.split(".")[0] for one in imported} & UNSAFE_MODULES, name
        for node in walk(modules()[name], lazy=True):
            if isinstance(node, ast.Call):
                assert not unsafe(node), f"{name}:{node.lineno}"


def unsafe(call: ast.Call) -> bool:
    """Whether it may run what it reads."""
    if any(keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False" for keyword in call.keywords):
        return True
    if isinstance(call.func, ast.Name):
        return call.func.id in UNSAFE_CALLS
    return ast.unparse(call.func) in ("torch.load", "torch.save", "torch.hub.load")


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("peerd", {"torch", "trio", "numpy"}),
        ("peerd.daemon.main", {"torch", "matplotlib", "peerd.trainer.swarm"}),
        ("peerd.cli.main", {"torch", "matplotlib", "numpy", "trio"}),
        (", ".join(f"peerd.cli.{name}" for name in sorted(set(VERBS.values()))), {"torch", "matplotlib"}),
        ("peerd.cli.start", {"peerd.cli.demo", "peerd.simulation"}),
        ("peerd.trainer.swarm", {"trio", "peerd.transport.connection", "peerd.daemon"}),
    ],
)
def test_what_is_not_loaded(module: str, absent: set[str]) -> None:
    program = f"import sys, {module}; print(*sorted(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not absent & set(ran.stdout.split())


WALL_CLOCKS = {"peerd.local.identity", "peerd.security.wall_clock"}


def test_no_duration_is_taken_from_the_clock_on_the_wall() -> None:
    """It jumps. The stamps of the log are made by logging; a count of starts that is lost goes on from it,
    and certificates end by it."""
    wall = ("time.time", "time.time_ns", "datetime.now")
    read = [
        f"{name}, line {node.lineno}"
        for name, module in modules().items()
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in wall and name not in WALL_CLOCKS
    ]
    assert not read
