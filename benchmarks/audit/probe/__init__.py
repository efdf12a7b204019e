"""What is added to a copy of an audited app, under drawn names: it imports nothing of this project.

The server's half sees what crosses the wire and writes to the server's folder. The clients' half sees batches, model
and optimiser, and writes to the evaluator's folder, whose place the server's half is not told.
"""
