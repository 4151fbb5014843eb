"""Trajectories: collected with the runner (collect.py), kept as hashed Parquet shards (store.py), regenerated bit for
bit (replay.py).

The journey of one sample: rewards.py scores it, trajectory.py checks it, journal.py makes it survive a kill, shards.py
turns a full shard into bytes, manifest.py says what the directory holds and hashes it.
"""
