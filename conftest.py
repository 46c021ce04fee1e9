"""What pytest leaves alone: modules that import a library which is not installed have no doctests to run."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("transformers") else ["src/ringspan/integrations/transformers_cache.py"]
