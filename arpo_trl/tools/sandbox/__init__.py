"""The walls around model-written Python. `launch.py` runs in the trainer, the other modules run inside the sandbox too
and therefore import nothing but the standard library."""
