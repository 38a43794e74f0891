"""The training loop and the run directory.

Read method.py (the interface of a recipe) and train.py (the loop) first. parts.py, optimisers.py and refreshing.py
build what the loop uses: accelerator, sampler, optimiser, and plans from fresh embeddings. runs.py is the run
directory, with checkpoints.py, records.py, boards.py and data_record.py (the data and encoder that were trained);
checks.py checks options before anything is loaded.
"""
