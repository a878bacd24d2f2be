"""The configuration as text: a TOML file, and the reference page of every key."""

from fedprophet.config.config import Config, config_model
from fedprophet.config.load import PRESETS
from fedprophet.config.renamed import RENAMED
from fedprophet.settings.describe import as_markdown, as_toml

_HEAD = """\
# Configuration

<!-- Made by `fedprophet config reference` from the settings classes; edit those instead. -->

A run is configured by a preset's name or a TOML file, and by `--set KEY=VALUE`, which may be repeated:

    fedprophet train digits --set seed=3 --set train.batch=32
    fedprophet config show digits > mine.toml    # every key with its meaning, ready to be edited
    fedprophet train mine.toml

A key that a file leaves out has the default below. A value after `--set` is read as TOML; if it is not TOML, it is
taken as text, so names need no quotes.

A file may hold settings for a single method, such as the rounds of a baseline. They replace the others when the run
uses that method, and `--set` overrides both:

```toml
rounds = 500

[methods.heterofl]
rounds = 1000

[methods.heterofl.train]
learning_rate = 0.01
```

`fedprophet config show FILE --method heterofl` prints the result.

Values that contradict each other are refused. A key that merely has no effect, because the method does not use it or
another key switches it off, is noted when the run starts, if somebody has chosen its value for this run: with `--set`,
in a file (where keys of other methods are expected) or in Python. Presets' own keys are not noted.

Some keys have a new name. The old one is read for one version, with a note unless it has its default:

"""


def to_toml(config: Config, comments: bool = False) -> str:
    """Return the configuration as TOML that reads back as the same; with `comments`, each key's meaning above it."""
    return as_toml(config, comments)


def reference_markdown() -> str:
    """Return the reference page of every key, made from the settings classes."""
    renamed = "\n".join(f"- `{old}` is now `{new.key}`" for old, new in RENAMED.items())
    presets = "\n".join(f"- `{name}`: {text}" for name, text in PRESETS.items())
    return f"{_HEAD}{renamed}\n\nPresets:\n\n{presets}\n\n{as_markdown(config_model())}"
