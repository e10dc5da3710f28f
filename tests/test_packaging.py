"""What is shipped: the stub matches the module, and the source distribution is complete."""

import ast
import inspect
import pathlib
import re
import tarfile

import pytest

import normalign
from normalign import _load

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = pathlib.Path(normalign.__file__).parent


def _stub_names(body):
    """Names of the stub: a function's number of arguments, a class's names, None for a value."""
    names = {}
    for node in body:
        if isinstance(node, ast.FunctionDef):
            arguments = node.args.posonlyargs + node.args.args
            names[node.name] = len([a for a in arguments if a.arg != "self"])
        elif isinstance(node, ast.ClassDef):
            bases = [names[base.id] for base in node.bases]
            names[node.name] = {k: v for base in bases for k, v in base.items()}
            names[node.name] |= _stub_names(node.body)
        elif isinstance(node, ast.AnnAssign):
            names[node.target.id] = None
    return names


def _module_names(module):
    names = {}
    for name, value in vars(module).items():
        if inspect.isclass(value):
            names[name] = _module_names(value)
        elif name == "__init__" or not name.startswith("_"):
            names[name] = None
            if callable(value):
                # pybind11 writes "name(arg0: int, arg1: int) -> None" on the first line
                arguments = re.match(rf"{name}\((.*)\) ->", value.__doc__)[1]
                names[name] = len(re.findall(r"(?!self)\b\w+: ", arguments))
    return names


@pytest.mark.skipif(_load._C is None, reason=str(_load.cpu_error))
def test_stub_matches_the_module():
    stub = ast.parse((PACKAGE / "_C.pyi").read_text())
    assert _module_names(_load._C) == _stub_names(stub.body)


def test_source_distribution_is_complete(tmp_path, monkeypatch):
    backend = pytest.importorskip("scikit_build_core.build")
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    monkeypatch.chdir(ROOT)
    with tarfile.open(tmp_path / backend.build_sdist(str(tmp_path))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = [p for p in (ROOT / "csrc").rglob("*") if p.is_file()]
    modules = [*(ROOT / "normalign").rglob("*.py"), *(ROOT / "normalign").rglob("*.pyi")]
    for path in [*sources, *modules, ROOT / "CMakeLists.txt", ROOT / "LICENSE", ROOT / "README.md"]:
        assert str(path.relative_to(ROOT)) in names
    assert not [n for n in names if n.endswith((".so", ".o", ".pyc")) or n.startswith("build/")]
