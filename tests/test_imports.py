"""Who may import whom: downwards only, cores without clocks or sockets, and nothing that runs what it loads."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"peerd": ROOT / "peerd", **{f"peerd.{name}": ROOT / name for name in ("transport", "training", "cli")}}

CORES = {
    "peerd.messages", "peerd.effects", "peerd.plan", "peerd.replica", "peerd.roles",
    "peerd.membership", "peerd.dissemination", "peerd.probing", "peerd.roster", "peerd.suspicion",
    "peerd.table_exchange", "peerd.timing",
    "peerd.training.delta", "peerd.training.mass", "peerd.training.outer", "peerd.training.public_copy",
    "peerd.training.reference", "peerd.training.scratch", "peerd.training.squeeze", "peerd.training.trigger",
    "peerd.transport.admission", "peerd.transport.framing", "peerd.transport.wire",
}  # fmt: skip
CORE_PACKAGES = ("peerd.training.modes", "peerd.training.codecs", "peerd.training.collectives")
SHELLS = {
    "peerd.daemon", "peerd.swarm_view", "peerd.peers", "peerd.lane", "peerd.model_side", "peerd.exchanges",
    "peerd.catch_up", "peerd.trainer_session", "peerd.control", "peerd.supervisor", "peerd.metrics",
    "peerd.known_members", "peerd.plan_keeper", "peerd.doctor",
}  # fmt: skip
SHELL_PACKAGES = ("peerd.transport", "peerd.cli")
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
INTERFACES = {"peerd.shared_memory", "peerd.transport.link"}  # what a core may see of a shell: arrays, limits


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


MODULES = modules()


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
    for node in walk(MODULES[name], lazy=lazy):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: a relative import"
            module = node.module or ""
            inner = {f"{module}.{alias.name}" for alias in node.names} & MODULES.keys()
            found |= inner
            if len(inner) < len(node.names):
                found.add(module)
    return found


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def is_core(name: str) -> bool:
    return name in CORES or within(name, CORE_PACKAGES)


IMPORTS = {name: imports(name) for name in sorted(MODULES)}


def of(package: str) -> dict[str, set[str]]:
    """The modules of a package, with what they import."""
    return {name: imported for name, imported in IMPORTS.items() if within(name, (package,))}


def test_the_lists_name_modules_that_exist() -> None:
    assert not (CORES | SHELLS) - MODULES.keys()
    assert not CORES & SHELLS


def test_training_and_transport_do_not_know_each_other() -> None:
    for package, other in (("peerd.training", "peerd.transport"), ("peerd.transport", "peerd.training")):
        assert not {name for name, imported in of(package).items() if any(within(one, (other,)) for one in imported)}


def test_training_and_transport_know_only_messages_and_effects() -> None:
    for package in ("peerd.training", "peerd.transport"):
        for name, imported in of(package).items():
            foreign = {one for one in imported if within(one, ("peerd",)) and not within(one, (package,))}
            task = within(name, ("peerd.training.tasks",))  # a task is a user's script: it attaches
            assert foreign <= {"peerd.messages", "peerd.effects", "peerd.sealed_file"} | (
                {"peerd"} if task else set()
            ), name


def test_messages_are_at_the_bottom_and_effects_above_them() -> None:
    assert not {one for one in IMPORTS["peerd.messages"] if within(one, ("peerd",))}
    assert {one for one in IMPORTS["peerd.effects"] if within(one, ("peerd",))} == {"peerd.messages"}


def test_only_the_command_line_imports_itself_the_daemon_and_the_trainer() -> None:
    tops = {"peerd.daemon", "peerd.trainer"}
    below = {name: imported for name, imported in IMPORTS.items() if not within(name, ("peerd.cli",))}
    assert not {name for name, imported in below.items() if imported & tops}
    assert not {name for name, imported in below.items() if any(within(one, ("peerd.cli",)) for one in imported)}


def test_imports_have_a_direction() -> None:
    graph = {name: imports(name, lazy=False) & MODULES.keys() - {name} for name in MODULES}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError with the cycle


def test_only_shells_import_trio() -> None:
    users = {name for name, imported in IMPORTS.items() if "trio" in imported}
    assert not {name for name in users if is_core(name)}
    assert not {name for name in users if name not in SHELLS and not within(name, SHELL_PACKAGES)}


def test_cores_have_no_clock_socket_or_thread() -> None:
    for name, imported in IMPORTS.items():
        if is_core(name):
            assert not {one.split(".")[0] for one in imported} & NOT_IN_CORES, name
            ours = {one for one in imported if within(one, ("peerd",))}
            assert not {one for one in ours if not is_core(one) and one not in INTERFACES}, name


def test_cores_are_given_their_randomness() -> None:
    for name in filter(is_core, IMPORTS):
        assert not IMPORTS[name] & {"secrets", "uuid", "numpy.random"}, name
        for node in walk(MODULES[name], lazy=True):
            if isinstance(node, ast.ImportFrom) and node.module == "random":
                assert [alias.name for alias in node.names] == ["Random"], name
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used = f"{node.value.id}.{node.attr}"
                assert used not in ("np.random", "os.urandom"), f"{name}:{node.lineno}"
                assert node.value.id != "random" or node.attr == "Random", f"{name}:{node.lineno} {used}"


def test_nothing_that_is_loaded_runs() -> None:
    for name, imported in IMPORTS.items():
        assert not {one.split(".")[0] for one in imported} & UNSAFE_MODULES, name
        for node in walk(MODULES[name], lazy=True):
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
        ("peerd.daemon", {"torch", "matplotlib", "peerd.trainer"}),
        ("peerd.cli.main", {"torch", "matplotlib"}),
        ("peerd.trainer", {"trio", "peerd.transport"}),
    ],
)
def test_what_is_not_loaded(module: str, absent: set[str]) -> None:
    program = f"import sys, {module}; print(*sorted(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not absent & set(ran.stdout.split())
