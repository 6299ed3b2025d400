"""Stub of datasets, which ``sglang.test.test_utils`` imports by way of its benchmarks and no test here uses."""


def load_dataset(*args, **kwargs):
    raise NotImplementedError("datasets stub")
