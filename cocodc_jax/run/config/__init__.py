"""Configuration of runs, from a line of a dataclass to a flag, JSON and help.

A new flag is one line of a section and an entry in the section's docstring, or an
argument of a method and an entry in the method's. Read the files in this order:

- `cocodc_jax.fields`: what one line of a section declares, and so one flag;
- the sections: `run_config` (with `stage_codec`), `optimizer_config`, `method_config`
  (which reads the arguments of methods from their functions), `data.config` and
  `models.config`; `elastic_flags` and `run.processes` are of one process, not of a run;
- `train_config`: all of them, their fields by name, JSON;
- `presets`: named values of it;
- `flags`: a flag for each field, and the preset with the flags that are given;
- modules that `flags` uses: `command_line` (one flag of any program), `help` (its
  text), `effects` (flags that would change nothing), `run.exits` (errors and exit
  codes).
"""

from cocodc_jax._lazy import attach, modules_of

__getattr__, __dir__ = attach(__name__, modules_of(__path__))
