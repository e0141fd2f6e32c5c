"""The main job, end to end: an engine under pressure, stopped and started again, with every routing row judged."""
