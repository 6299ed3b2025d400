"""Turn edits made in a build tree back into the hunks of one patch."""

import tempfile
from pathlib import Path

from . import git, patch, stack
from .errors import SeriesError
from .project import Project
from .tree import Tree


def refresh(project: Project, name: str, tree: Tree, only: list[str]) -> list[str]:
    """Rewrite patch `name` so that the series yields what `tree` holds.

    `only` limits this to the upstream paths it names; without it every edited
    file is taken. A later patch that touches the same file must still apply;
    its hunks are rewritten to their new lines. Returns the paths taken.

    Raises SeriesError, with every patch unchanged, when an edited file is last
    touched (within the tree's prefix) by a later patch, is not an upstream file,
    or when a later patch no longer applies.
    """
    index = project.index(name)
    built = project.prefix(tree.state().upto)
    if index >= len(built):
        raise SeriesError(f"{name}: not part of the prefix that {tree.folder} was built to")
    base = project.base
    states = stack.fold(base, project.series)
    taken = _taken(project, name, tree, built, states[len(built)], only)
    owner = project.series[index]
    after = {path: states[index + 1][path] for path in owner.touches}
    after.update({path: (tree.folder / path).read_bytes() for path in taken})
    before = {path: states[index].get(path, base.read(path)) for path in after}
    texts = {owner.name: owner.with_hunks(_hunks(before, after))}
    changed = list(project.series)
    changed[index] = patch.parse(owner.name, texts[owner.name])
    new_states = stack.fold(base, tuple(changed))
    for later in range(index + 1, len(changed)):
        item = changed[later]
        if set(item.touches) & set(taken):
            old = {path: new_states[later][path] for path in item.touches}
            new = {path: new_states[later + 1][path] for path in item.touches}
            texts[item.name] = item.with_hunks(_hunks(old, new))
    for patch_name, text in texts.items():
        (project.patches / f"{patch_name}.patch").write_bytes(text.encode())
    return taken


def _taken(project, name, tree, built, final, only) -> list[str]:
    """Return the edited paths that go into patch `name`."""
    base = project.base
    edited = []
    for path in tree.differences(final):
        if path not in base.files:
            raise SeriesError(f"{tree.folder / path}: not an upstream file; move it to {path}")
        if not (tree.folder / path).is_file():
            raise SeriesError(f"{tree.folder / path}: deleted; a patch only edits files")
        edited.append(path)
    wanted = [_upstream(project, tree, path) for path in only] or edited
    behind = built[project.index(name) + 1 :]
    for path in wanted:
        later = [item.name for item in behind if path in item.touches]
        if path in edited and later:
            raise SeriesError(
                f"{path}: also touched by {later[-1]}, which comes later; refresh that, name "
                f"the other files only, or edit in a tree built with --upto {name}"
            )
    return [path for path in wanted if path in edited]


def _upstream(project: Project, tree: Tree, path: str) -> str:
    """Return the upstream path that a user named, maybe through the build tree."""
    absolute = Path(path).absolute()
    if absolute.is_relative_to(tree.folder.absolute()):
        path = absolute.relative_to(tree.folder.absolute()).as_posix()
    if path not in project.base.files:
        raise SeriesError(f"{path}: not a file of the base")
    return path


def _hunks(before: dict[str, bytes], after: dict[str, bytes]) -> str:
    """Return the hunks that lead from `before` to `after`."""
    with tempfile.TemporaryDirectory() as scratch:
        return git.diff(before, after, Path(scratch))
