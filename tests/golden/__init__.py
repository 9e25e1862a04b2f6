"""Golden records: what earlier versions recorded of every construct is read, traced, forked and resumed alike.

- `cases.py` lists the runs, `teams.py` and `unit_teams.py` have their definitions, `model.py` what their model answers.
- `cases/RUNTIME/CASE.jsonl` is the record of a run, a line of JSON for the run, each long text and each fact;
  `CASE.said.json` what the version that made it said of it, and what a resume of it did.
- `records.py` restores them with plain SQL into files, or into PostgreSQL.
- `python -m tests.golden.make` makes records of cases that have none. Those that are there were made by earlier versions:
  they stay as they are, also when the format of records changes; a case for the new one gets another name.
"""
