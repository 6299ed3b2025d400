"""Keep a patch series against one pinned SGLang release.

``python -m tools.series`` builds, checks, counts, exports and applies it.
The layout it works on is described by :class:`tools.series.project.Project`.
"""
