"""``python -m fa101.bench --suite NAME``: every table of the project, measured in one way.

Reading order: ``suites`` (what is asked), ``peers`` (who answers), ``runner`` (checked first, then
timed in turns), ``timing`` (the clocks), ``report`` and ``tables`` (what is printed).

Only running it needs PyTorch (``pip install 'fa101[bench]'``): it provides the device memory, the
device events and most of the peers.
"""
