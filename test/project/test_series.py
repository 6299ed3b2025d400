"""The patch series' tool, on a base of four small files."""

import base64
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools.series import apply, patch, stack, target
from tools.series.__main__ import main
from tools.series.errors import SeriesError
from tools.series.project import Project

TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"
UPSTREAM = {
    "sglang/__init__.py": "",
    "sglang/srt/__init__.py": "",
    "sglang/srt/args.py": "".join(f"line_{n} = {n}\n" for n in range(40)),
    "sglang/srt/pool.py": "def pool():\n    return 1\n",
}
ARGS, POOL, NEW = (f"python/sglang/srt/{name}.py" for name in ("args", "pool", "offload"))
PROGRAM = POOL
TEST = "test/srt/test_offload.py"


def make_wheel(cache: Path) -> str:
    """Write a wheel of UPSTREAM and return its hash."""
    cache.mkdir(parents=True)
    record = ""
    wheel = cache / f"sglang-1.0-{TAG}-{TAG}-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in UPSTREAM.items():
            code = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
            record += f"{name},sha256={code.decode().rstrip('=')},{len(text)}\n"
            info = zipfile.ZipInfo(name)
            info.external_attr = (0o100755 if name == PROGRAM.removeprefix("python/") else 0o100644) << 16
            archive.writestr(info, text)
        archive.writestr("sglang-1.0.dist-info/RECORD", record)
        archive.writestr("sglang-1.0.dist-info/METADATA", "Name: sglang\nVersion: 1.0\n")
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def header(subject: str, owns=()) -> str:
    text = f"Subject: {subject}\nProblem: It lacks something.\n .\n More of it.\n"
    text += "Change: It is added.\nEvidence: A test.\nUpstream-Status: not sent\n"
    if owns:
        text += "Owns:\n" + "".join(f" {path}\n" for path in owns)
    return text + "\n"


def hunk(path: str, old: str, new: str, line: int = 1) -> str:
    """A hunk without context that replaces one line."""
    return (
        f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n"
        f"@@ -{line},3 +{line},3 @@\n line_{line - 1} = {line - 1}\n-{old}\n+{new}\n"
        f" line_{line + 1} = {line + 1}\n"
    )


class Repo:
    """A repository in a temporary folder, and the tool run on it."""

    def __init__(self, root: Path, capsys):
        self.root = root
        self.capsys = capsys
        root.mkdir()
        sha256 = make_wheel(root / "build" / "base")
        pin = f'name = "sglang"\nversion = "1.0"\ntag = "v1.0"\n[sha256]\n{TAG} = "{sha256}"\n'
        (root / "base.toml").write_text(pin)
        (root / "patches").mkdir()
        self.tree = root / "build" / "sglang"

    def project(self) -> Project:
        return Project(self.root)

    def series(self, *names: str) -> None:
        (self.root / "patches" / "series").write_text("# in order\n" + "\n".join(names) + "\n")

    def patch(self, name: str, text: str) -> None:
        (self.root / "patches" / f"{name}.patch").write_text(text)

    def read(self, name: str) -> str:
        return (self.root / "patches" / f"{name}.patch").read_text()

    def write(self, path: str, text: str) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    def run(self, *args) -> str:
        status = main([str(arg) for arg in args], root=self.root)
        out = self.capsys.readouterr()
        assert status == 0, out.err
        return out.out

    def fails(self, *args) -> str:
        assert main([str(arg) for arg in args], root=self.root) == 2
        said = self.capsys.readouterr().err
        assert said.startswith("error: ") and said.count("\n") == 1
        return said

    def two_patches(self) -> None:
        """A fix of one line, then a feature with one edit, one module and one test."""
        self.series("0001-fix-args", "0002-offload")
        self.patch("0001-fix-args", header("Fix the arguments") + hunk(ARGS, "line_1 = 1", "line_1 = 'fixed'"))
        self.patch(
            "0002-offload",
            header("Add offload", [NEW, TEST]) + hunk(ARGS, "line_20 = 20", "line_20 = 'mine'", 20),
        )
        self.write(NEW, "from sglang.srt import args\n\nVALUE = args.line_20\n")
        self.write(TEST, "from sglang.srt.offload import VALUE\n\n\ndef test():\n    assert VALUE == 'mine'\n")


@pytest.fixture
def repo(tmp_path, capsys):
    return Repo(tmp_path / "repo", capsys)


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`, git's own aside."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".git" not in path.parts
    }


def site_packages(repo: Repo, tmp_path: Path) -> Path:
    folder = tmp_path / "site-packages"
    (wheel,) = (repo.root / "build" / "base").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    (folder / "test" / "srt").mkdir(parents=True)
    for name, text in UPSTREAM.items():
        place = folder / "python" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return folder


class TestPatch:
    def test_message_holds_every_section(self):
        item = patch.parse("a", header("Do it", [NEW]))
        assert item.message().startswith("Do it\n\nProblem: It lacks something.\n\nMore of it.")
        assert item.message().endswith("Upstream-Status: not sent\n")
        assert item.owns == (NEW,) and item.touches == () and not item.is_fix

    def test_names_of_fixes(self):
        for name, expected in (("fix-a", True), ("0003-fix-a", True), ("prefix-a", False)):
            assert patch.parse(name, header("x", [NEW])).is_fix is expected

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            (header("x"), "neither owns"),
            (header("x", ["docs/a.md"]), "under neither"),
            (header("x", ["python/sglang/../../a"]), "under neither"),
            (header("x", [NEW, NEW]), "twice"),
            (header("x", [NEW]).replace("Evidence: A test.\n", ""), "no Evidence"),
            ("Aim: x\n" + header("x", [NEW]), "unknown field"),
            ("x\n" + header("x", [NEW]), "neither a field"),
            (header("x") + hunk("test/srt/a.py", "a", "b"), "not under"),
            (header("x") + hunk(ARGS, "a", "b").replace("---", "new file mode 100644\n---"), "only edit"),
            (header("x") + f"--- a/{ARGS}\n+++ b/{ARGS}\n@@ -1 +1 @@\n-a\n+b\n", "diff --git"),
        ],
    )
    def test_refuses(self, text, said):
        with pytest.raises(SeriesError, match=said):
            patch.parse("x", text)


class TestSeries:
    def test_faults_of_the_listing(self, repo):
        repo.series("a")
        assert "not there" in repo.fails("build")
        repo.patch("a", header("x", [NEW]))
        repo.patch("b", header("x", [NEW]))
        assert "not listed" in repo.fails("build")
        repo.series("a", "b")
        assert "owned by both a and b" in repo.fails("build")
        repo.patch("b", header("x", [TEST]))
        repo.patch("fix-c", header("x", ["python/sglang/c.py"]))
        repo.series("a", "b", "fix-c")
        assert "must come before a" in repo.fails("build")
        repo.series("a", "a")
        assert "stands twice" in repo.fails("build")

    def test_base_with_another_hash_is_refused(self, repo):
        pin = repo.root / "base.toml"
        pin.write_text(pin.read_text().replace(f'{TAG} = "', f'{TAG} = "00'))
        assert "the pin says" in repo.fails("build")

    def test_hunk_must_match_exactly(self, repo):
        repo.series("a")
        repo.patch("a", header("x") + hunk(ARGS, "line_1 = 2", "line_1 = 3"))
        assert "a: does not apply" in repo.fails("build")
        repo.patch("a", header("x") + hunk("python/sglang/no.py", "a", "b"))
        assert "does not have" in repo.fails("build")


class TestBuild:
    def test_empty_series(self, repo):
        assert "with 0 patches" in repo.run("build")
        assert snapshot(repo.tree / "python" / "sglang").keys() == {
            name.removeprefix("sglang/") for name in UPSTREAM
        }
        repo.run("check")
        assert "0 files, 0 lines" in repo.run("count")

    def test_new_files_are_live_links(self, repo):
        repo.two_patches()
        repo.run("build")
        repo.write(NEW, "VALUE = 7\n")
        assert (repo.tree / NEW).read_text() == "VALUE = 7\n"
        assert "'mine'" in (repo.tree / ARGS).read_text()

    def test_new_file_without_a_patch_is_linked(self, repo):
        repo.run("build")
        repo.write(NEW, "VALUE = 7\n")
        repo.run("build")
        assert (repo.tree / NEW).is_symlink()
        (repo.root / NEW).unlink()
        repo.run("build")
        assert not os.path.lexists(repo.tree / NEW)

    def test_follows_the_series_both_ways(self, repo):
        repo.two_patches()
        repo.run("build")
        repo.series("0001-fix-args")
        for path in ("patches/0002-offload.patch", NEW, TEST):
            (repo.root / path).unlink()
        repo.run("build")
        assert not os.path.lexists(repo.tree / NEW) and not (repo.tree / "test").exists()
        text = (repo.tree / ARGS).read_text()
        assert "'fixed'" in text and "'mine'" not in text

    def test_upto(self, repo):
        repo.two_patches()
        repo.run("build", repo.root / "p1", "--upto", "0001-fix-args")
        assert "'mine'" not in (repo.root / "p1" / ARGS).read_text()

    def test_edits_survive_unless_forced(self, repo):
        repo.two_patches()
        repo.run("build")
        edited = repo.tree / ARGS
        edited.write_text(edited.read_text() + "edit = 1\n")
        assert f"kept an unrefreshed edit: {edited}" in repo.run("build")
        repo.patch("0001-fix-args", repo.read("0001-fix-args").replace("fixed", "other"))
        assert f"{edited}: has an unrefreshed edit" in repo.fails("build")
        assert "edit = 1" in edited.read_text() and "'fixed'" in edited.read_text()
        repo.run("build", "--force")
        assert "edit = 1" not in edited.read_text() and "'other'" in edited.read_text()

    def test_edit_elsewhere_does_not_stop_a_build(self, repo):
        repo.two_patches()
        repo.run("build")
        (repo.tree / POOL).write_text("mine = 1\n")
        repo.patch("0001-fix-args", repo.read("0001-fix-args").replace("fixed", "other"))
        assert "kept" in repo.run("build")
        assert "'other'" in (repo.tree / ARGS).read_text()
        assert (repo.tree / POOL).read_text() == "mine = 1\n"

    def test_refuses_a_foreign_folder(self, repo, tmp_path):
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "file").write_text("")
        assert "not a build tree" in repo.fails("build", tmp_path / "other")


class TestRefresh:
    def test_takes_an_edit_and_a_file_not_touched_before(self, repo):
        repo.two_patches()
        repo.run("build")
        for path in (ARGS, POOL):
            (repo.tree / path).write_text((repo.tree / path).read_text() + "edit = 1\n")
        head = repo.read("0002-offload").split("diff --git")[0]
        repo.run("refresh", "0002-offload")
        text = repo.read("0002-offload")
        assert text.startswith(head) and text.count("+edit = 1") == 2
        assert "kept" not in repo.run("build")
        repo.run("build", repo.root / "again")
        for path in (ARGS, POOL):
            assert (repo.root / "again" / path).read_text() == (repo.tree / path).read_text()

    def test_refuses_a_file_that_a_later_patch_touches(self, repo):
        repo.two_patches()
        repo.run("build")
        (repo.tree / ARGS).write_text((repo.tree / ARGS).read_text() + "edit = 1\n")
        before = repo.read("0001-fix-args")
        assert f"{ARGS}: also touched by 0002-offload" in repo.fails("refresh", "0001-fix-args")
        assert repo.read("0001-fix-args") == before

    def test_named_files_only(self, repo):
        repo.two_patches()
        repo.run("build")
        for path in (ARGS, POOL):
            (repo.tree / path).write_text((repo.tree / path).read_text() + "edit = 1\n")
        repo.run("refresh", "0001-fix-args", repo.tree / POOL)
        assert POOL in repo.read("0001-fix-args")
        assert "kept an unrefreshed edit" in repo.run("build")
        assert "comes later" in repo.fails("refresh", "0001-fix-args", ARGS)

    def test_takes_a_file_that_only_an_earlier_patch_touched(self, repo):
        repo.two_patches()
        repo.patch("0002-offload", header("Add offload", [NEW, TEST]))
        repo.run("build")
        (repo.tree / ARGS).write_text((repo.tree / ARGS).read_text() + "edit = 1\n")
        repo.run("refresh", "0002-offload")
        assert "+edit = 1" in repo.read("0002-offload")
        assert "edit" not in repo.read("0001-fix-args")

    def test_earlier_patch_in_a_prefix_moves_the_later_ones(self, repo):
        repo.two_patches()
        prefix = repo.root / "p1"
        repo.run("build", prefix, "--upto", "0001-fix-args")
        (prefix / ARGS).write_text("top = 1\n" + (prefix / ARGS).read_text())
        repo.run("refresh", "0001-fix-args", "--dir", prefix)
        assert "+21," in repo.read("0002-offload") or "+19," in repo.read("0002-offload")
        repo.run("build")
        text = (repo.tree / ARGS).read_text()
        assert text.startswith("top = 1\n") and "'mine'" in text
        (prefix / ARGS).write_text((prefix / ARGS).read_text().replace("line_20 = 20", "line_20 = 5"))
        assert "0002-offload: does not apply" in repo.fails("refresh", "0001-fix-args", "--dir", prefix)

    def test_refuses_new_and_deleted_files(self, repo):
        repo.two_patches()
        repo.run("build")
        stray = repo.tree / "python/sglang/stray.py"
        stray.write_text("")
        assert "move it to python/sglang/stray.py" in repo.fails("refresh", "0002-offload")
        stray.unlink()
        (repo.tree / POOL).unlink()
        assert "deleted" in repo.fails("refresh", "0002-offload")


class TestApply:
    def test_installed_package_and_back(self, repo, tmp_path):
        repo.two_patches()
        site = site_packages(repo, tmp_path)
        before = snapshot(site)
        assert "not applied" in repo.run("status", site)
        assert ": applied" in repo.run("apply", site)
        assert "nothing to do" in repo.run("apply", site)
        assert repo.run("status", site).endswith(": applied\n")
        assert (site / "sglang/srt/offload.py").is_file() and not (site / "test").exists()
        assert not (site / "sglang/srt/offload.py").is_symlink()
        run = "from sglang.srt.offload import VALUE; print(VALUE)"
        done = subprocess.run([sys.executable, "-c", run], cwd=site, capture_output=True, text=True)
        assert done.stdout == "mine\n"
        repo.run("reverse", site)
        after = {name: data for name, data in snapshot(site).items() if "__pycache__" not in name}
        assert after == before
        assert "nothing to do" in repo.run("reverse", site)

    def test_checkout_gets_tests_and_keeps_other_changes(self, repo, tmp_path):
        repo.two_patches()
        folder = checkout(tmp_path)
        (folder / POOL).write_text("another change\n")
        before = snapshot(folder)
        repo.run("apply", folder)
        assert (folder / TEST).is_file() and (folder / POOL).read_text() == "another change\n"
        repo.run("reverse", folder)
        assert snapshot(folder) == before

    def test_newer_state_replaces_the_older(self, repo, tmp_path):
        repo.two_patches()
        site = site_packages(repo, tmp_path)
        before = snapshot(site)
        repo.run("apply", site)
        repo.write(NEW, "VALUE = 8\n")
        assert "another state" in repo.run("status", site)
        repo.run("apply", site)
        assert (site / "sglang/srt/offload.py").read_text() == "VALUE = 8\n"
        repo.run("reverse", site)
        assert snapshot(site) == before

    @pytest.mark.parametrize("path", ["sglang/srt/args.py", "sglang/srt/offload.py"])
    def test_changed_base_is_left_untouched(self, repo, tmp_path, path):
        repo.two_patches()
        site = site_packages(repo, tmp_path)
        (site / path).write_text("not the base\n")
        before = snapshot(site)
        for command in ("apply", "status"):
            assert path in repo.fails(command, site)
        assert snapshot(site) == before

    def test_changed_after_apply(self, repo, tmp_path):
        repo.two_patches()
        site = site_packages(repo, tmp_path)
        repo.run("apply", site)
        (site / "sglang/srt/args.py").write_text("changed\n")
        before = snapshot(site)
        for command in ("apply", "status", "reverse"):
            assert "args.py: changed since" in repo.fails(command, site)
        assert snapshot(site) == before

    def test_another_release_installed_over_it(self, repo, tmp_path):
        """As pip does it: its files are new, its metadata is, and what the series added stays."""
        repo.two_patches()
        site = site_packages(repo, tmp_path)
        repo.run("apply", site)
        (site / "sglang/srt/args.py").write_text("of 1.1\n")
        (site / "sglang-1.0.dist-info").rename(site / "sglang-1.1.dist-info")
        said = repo.fails("reverse", site)
        assert "applied to sglang 1.0, and 1.1 was installed over it" in said and "reverse the series before pip" in said

    def test_cut_short(self, repo, tmp_path, monkeypatch):
        repo.two_patches()
        site = site_packages(repo, tmp_path)
        before = snapshot(site)
        replace = apply._replace

        def fail_on_args(place, content):
            if place.name == "args.py":
                raise OSError("disk full")
            replace(place, content)

        monkeypatch.setattr(apply, "_replace", fail_on_args)
        assert "disk full" in repo.fails("apply", site)
        monkeypatch.undo()
        assert "in part" in repo.run("status", site)
        repo.run("reverse", site)
        assert snapshot(site) == before

    def test_wrong_version(self, repo, tmp_path):
        repo.two_patches()
        site = site_packages(repo, tmp_path)
        (site / "sglang-1.0.dist-info").rename(site / "sglang-0.9.dist-info")
        assert "holds sglang 0.9" in repo.fails("apply", site)

    def test_wrong_tag(self, repo, tmp_path):
        repo.two_patches()
        folder = checkout(tmp_path)
        sign = ["-c", "user.name=a", "-c", "user.email=a@b"]
        for command in (["init", "-q"], ["add", "."], [*sign, "commit", "-qm", "x"], ["tag", "v0.9"]):
            subprocess.run(["git", *command], cwd=folder, check=True)
        assert "holds sglang v0.9" in repo.fails("apply", folder)
        subprocess.run(["git", "tag", "-d", "v0.9"], cwd=folder, check=True, capture_output=True)
        subprocess.run(["git", "tag", "v1.0"], cwd=folder, check=True)
        repo.run("apply", folder)

    def test_hard_links_and_modes(self, repo, tmp_path):
        repo.two_patches()
        site = site_packages(repo, tmp_path)
        edited = site / "sglang/srt/args.py"
        edited.chmod(0o640)
        os.link(edited, tmp_path / "shared")
        repo.run("apply", site)
        assert (tmp_path / "shared").read_text() == UPSTREAM["sglang/srt/args.py"]
        assert edited.stat().st_mode & 0o777 == 0o640

    def test_neither_kind_of_target(self, repo, tmp_path):
        with pytest.raises(SeriesError, match="neither"):
            target.locate(tmp_path)
        assert "one target" in repo.fails("apply")


class TestExport:
    def test_branch_and_mails(self, repo, tmp_path):
        repo.two_patches()
        repo.write("patches/cover-letter.txt", "Why\n")
        repo.run("build")
        out = tmp_path / "out"
        repo.run("export", out, "--mails")
        assert (out / "cover-letter.txt").read_text() == "Why\n"
        log = subprocess.run(
            ["git", "log", "--reverse", "--format=%s"], cwd=out, capture_output=True, text=True
        ).stdout.splitlines()
        assert log == ["sglang 1.0, as released", "Fix the arguments", "Add offload"]
        for path in (ARGS, NEW, TEST):
            assert (out / path).read_text() == (repo.tree / path).read_text()
        fresh = checkout(tmp_path)
        sign = ["-c", "user.name=a", "-c", "user.email=a@b"]
        for command in (["init", "-q"], ["add", "."], [*sign, "commit", "-qm", "base"]):
            subprocess.run(["git", *command], cwd=fresh, check=True)
        mails = sorted(str(path) for path in (out / "mails").iterdir())
        subprocess.run(["git", *sign, "am", "-q", "--keep-non-patch", *mails], cwd=fresh, check=True)
        for path in (ARGS, NEW, TEST):
            assert (fresh / path).read_text() == (repo.tree / path).read_text()
        assert "not an empty folder" in repo.fails("export", out)


    def test_subjects_and_modes_are_kept(self, repo, tmp_path):
        """A plain unzip of the wheel forgets that a file is a program."""
        repo.two_patches()
        name = sorted(path.stem for path in (repo.root / "patches").glob("*.patch"))[-1]
        repo.patch(name, repo.read(name).replace("Subject: ", "Subject: [NSA] ", 1))
        out = tmp_path / "out"
        assert "--keep-non-patch" in repo.run("export", out, "--mails")
        assert "Subject: [PATCH 2/2] [NSA] " in sorted((out / "mails").iterdir())[-1].read_text()
        listed = subprocess.run(["git", "ls-tree", "base", PROGRAM], cwd=out, capture_output=True, text=True).stdout
        assert listed.startswith("100755 ")


class TestCheck:
    def test_sound_series_with_tests(self, repo):
        repo.two_patches()
        repo.run("build")
        said = repo.run("check", "--tests", "--stubs", repo.root)
        assert "0001-fix-args: 1 edited, 0 new, 1 modules import" in said
        assert "2 modules import, 1 passed" in said

    def test_shared_test_helpers_see_the_prefix(self, repo):
        repo.two_patches()
        place = "ROOT = __import__('pathlib').Path(__file__).resolve().parents[1]\n"
        repo.write("test/helper.py", place)
        repo.write("test/conftest.py", "import os, sys\nsys.path.insert(0, os.path.dirname(__file__))\n")
        body = "import helper\nimport sglang.srt.args as args\n\n\ndef test():\n"
        body += "    assert args.__file__ == str(helper.ROOT / 'build/sglang/python/sglang/srt/args.py')\n"
        repo.write(TEST, body)
        repo.run("build")
        assert "1 passed" in repo.run("check", "--tests")

    def test_prefix_that_does_not_import(self, repo):
        repo.two_patches()
        item = repo.read("0001-fix-args")
        repo.patch("0001-fix-args", item.replace("+line_1 = 'fixed'", "+line_1 = missing"))
        repo.run("build")
        said = repo.fails("check")
        assert "after it, sglang.srt.args does not import: NameError" in said

    def test_failing_test(self, repo):
        repo.two_patches()
        repo.write(TEST, "def test():\n    assert False\n")
        repo.run("build")
        assert "0002-offload: its tests fail: 1 failed" in repo.fails("check", "--tests")

    def test_owners(self, repo):
        repo.two_patches()
        repo.write("python/sglang/orphan.py", "")
        assert "owned by no patch" in repo.fails("check")
        (repo.root / "python/sglang/orphan.py").unlink()
        (repo.root / TEST).unlink()
        assert "not there" in repo.fails("check")

    def test_copy_of_an_upstream_file(self, repo):
        repo.series("a")
        repo.patch("a", header("x", [POOL]))
        repo.write(POOL, "")
        assert "a file of the base" in repo.fails("check")

    def test_tree_with_an_edit(self, repo):
        repo.two_patches()
        repo.run("build")
        (repo.tree / POOL).write_text("edit\n")
        assert "pool.py: differs from the series" in repo.fails("check")


POOL_HUNK = (
    f"diff --git a/{POOL} b/{POOL}\n--- a/{POOL}\n+++ b/{POOL}\n"
    "@@ -1,2 +1,2 @@\n def pool():\n-    return 1\n+    return 2\n"
)


class TestCount:
    def test_budget_without_fixes(self, repo):
        repo.two_patches()
        said = repo.run("count")
        assert f"     1        1  {ARGS}" in said
        assert "1 files, 2 lines" in said and "HiSparse: 22 files, about 645 lines" in said
        assert "over the budget" in repo.fails("count", "--max-lines", "1")
        assert "over the budget" in repo.fails("count", "--max-files", "0")

    def test_a_patch_apart(self, repo):
        repo.series("01-args", "02-pool", "03-args-again")
        repo.patch("01-args", header("A") + hunk(ARGS, "line_5 = 5", "line_5 = 50", line=5))
        repo.patch("02-pool", header("P") + POOL_HUNK)
        repo.patch("03-args-again", header("B") + hunk(ARGS, "line_20 = 20", "line_20 = 0", line=20))
        said = repo.run("count", "--apart", "02-pool")
        assert "this series: 1 files, 4 lines" in said and "apart, 02-pool: 1 files, 2 lines" in said
        said = repo.run("count", "--apart", "01-args")
        assert "this series: 2 files, 4 lines" in said and "apart, 01-args: 1 files, 2 lines" in said
        assert "this series: 2 files, 6 lines" in repo.run("count")
        for option in ("--apart-files", "--apart-lines"):
            assert "02-pool: 1 files" in repo.fails("count", "--apart", "02-pool", option, "0")
        assert "over the budget" in repo.fails("count", "--apart", "02-pool", "--max-lines", "3")
        assert "no such patch" in repo.fails("count", "--apart", "09-none")


def test_this_repository():
    """The real series applies to the real base, where that was fetched before."""
    project = Project(Path(__file__).parents[2])
    if not (project.root / "build" / "base").is_dir():
        pytest.skip("the base is not fetched yet")
    stack.fold(project.base, project.series)
