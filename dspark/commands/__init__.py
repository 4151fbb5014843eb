"""What the verbs of `dspark` run: a module each, with ``add_arguments(parser)`` and ``run(args) -> exit code``."""
