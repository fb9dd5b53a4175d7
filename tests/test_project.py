"""The project itself: what is shipped, who may import whom, and whether the documents are right."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections import Counter
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from tests.support import DOCUMENTS, ROOT, page

PACKAGE = ROOT / "singlebeat"
SCRIPTS = sorted(PACKAGE.rglob("*.lua"))
PUBLIC = {
    "Scheduler",
    "Schedule",
    "Entry",
    "Singleton",
    "clear_locks",
    "clocked",
    "DuplicateTaskError",
    "exclusive",
    "install",
}
#: What the package holds beside its code, and what the page cannot do without.
SHIPPED = {".py", ".lua", ".json", ".html", ".css", ".js", ".svg", ".LICENSE"}
OF_PAGE = {
    "templates/page.html",
    *(f"static/{name}" for name in ("page.css", "page.js", "htmx.min.js", "htmx.LICENSE")),
}
TOP_LEVEL = {"singlebeat", "tests", "docs", "exampleconf.py", "pyproject.toml", "README.rst", "LICENSE"}

#: Words in the place of an actor.
VAGUE = re.compile(r"\b(somebody|nobody|whoever|whatever|anybody)\b", re.IGNORECASE)

#: Lines of README.rst.
LONGEST_README = 160

#: Characters of a test's name.
LONGEST_NAME = 70

#: An argument of a script: ``KEYS[1]``; ``ARGV[3...]`` names all from the third on.
ARGUMENT = re.compile(r"\b(KEYS|ARGV)\[\s*(\d+)\s*(\.\.\.?)?\s*\]")


def names(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_wheel_holds_the_whole_package_and_nothing_else(tmp_path):
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT))
    (wheel,) = tmp_path.glob("*.whl")
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    source = {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*") if path.suffix in SHIPPED}

    assert shipped == source | {"singlebeat/py.typed"}
    assert {f"singlebeat/web/{name}" for name in OF_PAGE} <= shipped


def test_imports_go_down_the_floors_of_the_house():
    run(str(Path(sysconfig.get_path("scripts"), "lint-imports")), "--no-cache")


def test_there_are_scripts():
    assert SCRIPTS


@pytest.mark.parametrize("script", SCRIPTS, ids=names)
def test_the_header_of_a_script_is_its_contract(script):
    """It names the script, exactly the keys and arguments that the body uses, and the reply."""
    header, body = split(script.read_text("utf-8"))
    documented = [argument.groups() for line in header if (argument := ARGUMENT.match(line))]
    exact = [(kind, int(number)) for kind, number, tail in documented if not tail]
    tails = {kind: int(number) for kind, number, tail in documented if tail}
    used = {(kind, int(number)) for kind, number, _ in ARGUMENT.findall(body)}
    # Whatever is left after the numbered ones is an index that is computed, or the table as a whole.
    whole = set(re.findall(r"\b(KEYS|ARGV)\b", ARGUMENT.sub("", body)))

    assert header[0].startswith(f"{script.stem}: "), "the first line of the header is: --- name: what it does"
    assert len(exact) == len(set(exact)), "an argument is documented twice"
    assert {one for one in used if one[1] < tails.get(one[0], sys.maxsize)} == set(exact)
    assert whole == set(tails), "exactly what is used as a whole is documented as a tail, such as ARGV[3...]"
    for kind in ("KEYS", "ARGV"):
        numbers = sorted(number for of, number in [*exact, *tails.items()] if of == kind)
        assert numbers == list(range(1, len(numbers) + 1)), f"{kind} are documented from 1 on without a gap"
    assert any(re.match(r"returns\s+\S", line) for line in header), "the header says what the script returns"


def split(text: str) -> tuple[list[str], str]:
    """Return the lines of the header, and the body without its comments."""
    lines = text.splitlines()
    end = next(at for at, line in enumerate([*lines, ""]) if not line.startswith("--"))
    return [line.lstrip("-").strip() for line in lines[:end]], re.sub(r"--.*", "", "\n".join(lines[end:]))


@pytest.mark.parametrize("script", SCRIPTS, ids=names)
def test_the_server_can_compile_every_script(script, redis):
    assert redis.script_load(script.read_text("utf-8"))


def test_the_top_level_holds_only_files_that_a_reader_needs():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.splitlines()
    # An unpacked sdist is no repository, and has what the build left there.
    generated = {"PKG-INFO", "__pycache__", "build", "dist"}
    found = {Path(name).parts[0] for name in listed} or {path.name for path in ROOT.iterdir()} - generated

    assert {name for name in found if not name.startswith(".")} == TOP_LEVEL


def test_every_sentence_names_its_actor():
    """A leader, standby, worker, sender, caller, operator or another process: each does other things."""
    texts = [*PACKAGE.rglob("*.py"), *SCRIPTS, *DOCUMENTS, *(ROOT / ".github").rglob("*.md")]

    found = [
        f"{path.name}: {line}" for path in texts for line in path.read_text("utf-8").splitlines() if VAGUE.search(line)
    ]

    assert found == []


def test_the_readme_can_be_read_in_two_minutes():
    assert len((ROOT / "README.rst").read_text("utf-8").splitlines()) <= LONGEST_README


def test_every_link_of_the_readme_leads_to_a_file():
    links = re.findall(r"`[^`<]+<([^>]+)>`__?", (ROOT / "README.rst").read_text("utf-8"))

    assert len(links) > len(list((ROOT / "docs/how-to").glob("migrate-*.rst")))
    assert [link for link in links if not (ROOT / link).is_file()] == []


def test_the_style_of_the_page_has_at_most_12_kb():
    assert (ROOT / "singlebeat/web/static/page.css").stat().st_size <= 12 * 1024


def test_names_of_tests_are_short_sentences():
    tests = [
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text("utf-8"), re.M)
    ]

    assert [name for name in tests if len(name) > LONGEST_NAME] == []


def test_a_test_module_gives_a_name_to_one_thing_only():
    """Of two functions of one name, the second takes the place of the first, also in those above that call it."""
    for path in (ROOT / "tests").rglob("*.py"):
        body = ast.parse(path.read_text("utf-8")).body
        named = Counter(node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef))

        assert [name for name, count in named.items() if count > 1 and name != "_"] == [], path


def test_the_public_names_are_documented():
    singlebeat = importlib.import_module("singlebeat")
    api = page("reference/api")

    assert set(singlebeat.__all__) == PUBLIC
    assert {name for name in PUBLIC if not hasattr(singlebeat, name)} == set()
    assert {name for name in PUBLIC if not re.search(rf"\.\. auto\w+:: singlebeat\.{name}\b", api)} == (
        {"DuplicateTaskError"}  # which is printed with the other errors
    )
    assert set(re.findall(r"\.\. automodule:: (\S+)", api)) == {"singlebeat.errors", "singlebeat.embedded"}


@pytest.mark.parametrize("group", ["celery.beat_schedulers", "celery.commands"])
def test_an_entry_point_leads_to_something(group):
    ((name, value),) = project()["entry-points"][group].items()

    assert name == "singlebeat"
    assert callable(EntryPoint(name, value, group).load())


def test_the_scheduler_goes_by_its_short_name():
    """``celery beat -S singlebeat`` and ``-S singlebeat.Scheduler`` are the same."""
    assert project()["entry-points"]["celery.beat_schedulers"] == {"singlebeat": "singlebeat:Scheduler"}


def test_the_rights_in_the_docs_suffice_for_each_script():
    granted = set(re.findall(r"\+([a-z|]+)", page("how-to/redis")))
    wanted = {
        (path.name, command.lower())
        for path in SCRIPTS
        for command in re.findall(r'redis\.p?call\("(\w+)"', path.read_text("utf-8"))
    }

    assert {(script, command) for script, command in wanted if command not in granted} == set()
    assert len({command for _, command in wanted}) > 20
