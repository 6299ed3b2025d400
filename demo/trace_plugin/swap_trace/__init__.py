"""Watches a server with ``--enable-decode-nsa-kv-offload`` from the outside; changes nothing in it."""
