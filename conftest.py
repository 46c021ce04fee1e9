"""Settings of every run of pytest: profiles of random tests, and modules whose doctests need a missing library."""

from importlib.util import find_spec

from hypothesis import HealthCheck, settings

# Time limits for one example make no sense on a busy machine; pytest-timeout stops tests that hang.
# Tests that set their own number of examples scale it with the profile's: tests/strategies.py, `examples`.
for name, examples in (("fast", 25), ("full", 100)):
    settings.register_profile(name, max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fast")  # `pytest --hypothesis-profile full` takes the other one

collect_ignore = [] if find_spec("transformers") else ["src/ringspan/integrations/transformers_cache.py"]
