"""Many pictures: a list of jobs, run in this process or on a Ray cluster, with a manifest that survives any death.

`jobs` reads and expands job files lazily, `worker` makes one picture, `run` drives them, `grid` lays the results out.
"""
