"""``make demo``: the same requests with and without offloading, and evidence that rows moved.

Reading order: ``workload``, ``pair``, ``metrics``, ``evidence``, ``judge``, ``report``. The server with the flag on is watched by the
plugin in ``trace_plugin``.
"""
