"""``python -m tools.series COMMAND``: the command line of the series."""

import argparse
import sys
from pathlib import Path

from . import apply, check, count, export, refresh, target
from .errors import SeriesError
from .project import Project
from .tree import Tree


def main(argv: list[str] | None = None, root: Path | None = None) -> int:
    """Run one command and return its exit status: 0, or 2 after an error line.

    `root` is the repository to work on, by default the one this file is in.
    """
    args = _parser().parse_args(argv)
    project = Project(root or Path(__file__).resolve().parents[2])
    try:
        args.run(project, args)
    except (SeriesError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _build(project: Project, args) -> None:
    tree = _tree(project, args.dir)
    kept = tree.build(args.upto, args.force)
    for path in kept:
        print(f"kept an unrefreshed edit: {tree.folder / path}")
    size = len(project.prefix(args.upto))
    print(f"{tree.folder}: {project.pin.name} {project.pin.version} with {size} patches")


def _refresh(project: Project, args) -> None:
    tree = _tree(project, args.dir)
    taken = refresh.refresh(project, args.patch, tree, args.files)
    for path in taken:
        print(f"{args.patch}: took {path}")
    if not taken:
        print(f"{args.patch}: no edits; its line numbers were renewed")
    Tree(Project(project.root), tree.folder).build(tree.state().upto)


def _apply(project: Project, args) -> None:
    where = _target(args)
    done = apply.apply(project, where)
    print(f"{where.folder}: {'applied' if done else 'nothing to do'}")


def _reverse(project: Project, args) -> None:
    where = _target(args)
    done = apply.reverse(where)
    print(f"{where.folder}: {'restored' if done else 'nothing to do'}")


def _status(project: Project, args) -> None:
    where = _target(args)
    print(f"{where.folder}: {apply.status(project, where).value}")


def _export(project: Project, args) -> None:
    titles = export.export(project, args.dir, args.mails)
    for number, title in enumerate(titles, start=1):
        print(f"{number:4}  {title}")
    print(f"{args.dir}: {len(titles)} commits on branch {export.BRANCH}")
    if args.mails:
        print("apply the mails with: git am --keep-non-patch mails/*.patch  (plain git am drops [NSA] and [PD])")


def _check(project: Project, args) -> None:
    options = check.Options(
        stubs=args.stubs or project.root / "cpu_reference",
        imports=not args.no_imports,
        tests=args.tests or args.every_test,
        every_test=args.every_test,
    )
    check.layout(project)
    check.same_as_tree(project, _tree(project, args.dir))
    check.prefixes(project, options, lambda line: print(line, flush=True))
    print(f"the series of {len(project.series)} patches is sound")


def _count(project: Project, args) -> None:
    counts = count.count(project, args.apart)
    print(count.table(counts))
    _within("the series", counts, args.max_files, args.max_lines)
    if args.apart:
        counts = count.count_apart(project, args.apart)
        print(count.table_apart(args.apart, counts))
        _within(args.apart, counts, args.apart_files, args.apart_lines)


def _within(what: str, counts, max_files: int, max_lines: int) -> None:
    files, lines = count.totals(counts)
    if files > max_files or lines > max_lines:
        raise SeriesError(
            f"{what}: {files} files and {lines} lines are over the budget of "
            f"{max_files} files and {max_lines} lines"
        )


def _tree(project: Project, folder: Path | None) -> Tree:
    return Tree(project, (folder or project.default_tree).absolute())


def _target(args) -> target.Target:
    if args.installed == (args.target is not None):
        raise SeriesError("name one target: a folder, or --installed")
    return target.installed() if args.installed else target.locate(args.target)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.series")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    sub = command("build", _build, "make or update the build tree")
    sub.add_argument("dir", nargs="?", type=Path, help="default: build/sglang")
    sub.add_argument("--upto", metavar="PATCH", help="stop after this patch")
    sub.add_argument("--force", action="store_true", help="discard unrefreshed edits")

    sub = command("refresh", _refresh, "rewrite a patch's hunks from edits in the build tree")
    sub.add_argument("patch")
    sub.add_argument("files", nargs="*", help="take the edits of these upstream files only")
    sub.add_argument("--dir", type=Path, help="the build tree, default build/sglang")

    for name, run, text in (
        ("apply", _apply, "put the series into an installed package or a checkout"),
        ("reverse", _reverse, "undo apply, byte for byte"),
        ("status", _status, "tell whether the series is applied"),
    ):
        sub = command(name, run, text)
        sub.add_argument("target", nargs="?", type=Path, help="site-packages or a checkout")
        sub.add_argument("--installed", action="store_true", help="this interpreter's sglang")

    sub = command("export", _export, "write a git branch with one commit a patch")
    sub.add_argument("dir", type=Path)
    sub.add_argument("--mails", action="store_true", help="also write mails for git am")

    sub = command("check", _check, "check every prefix of the series")
    sub.add_argument("--tests", action="store_true", help="run each patch's own tests after it")
    sub.add_argument(
        "--every-test", action="store_true", help="run all tests so far after each patch"
    )
    sub.add_argument("--no-imports", action="store_true", help="do not import the modules")
    sub.add_argument("--stubs", type=Path, help="default: cpu_reference")
    sub.add_argument("--dir", type=Path, help="the build tree, default build/sglang")

    sub = command("count", _count, "count touched upstream files and lines")
    sub.add_argument("--max-files", type=int, default=10)
    sub.add_argument("--max-lines", type=int, default=100)
    sub.add_argument("--apart", metavar="PATCH", help="count this patch by itself")
    sub.add_argument("--apart-files", type=int, default=2)
    sub.add_argument("--apart-lines", type=int, default=25)
    return parser


if __name__ == "__main__":
    sys.exit(main())
