-- The tables of format 2, as they were made.
CREATE TABLE facts (
  seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, name TEXT NOT NULL, instance TEXT NOT NULL,
  at REAL NOT NULL, epoch INTEGER NOT NULL, data TEXT NOT NULL
);
CREATE INDEX facts_of_instance ON facts (instance);
CREATE TABLE bodies (sha256 TEXT PRIMARY KEY, body NOT NULL);
CREATE TABLE epochs (instance TEXT PRIMARY KEY, epoch INTEGER NOT NULL) WITHOUT ROWID;
CREATE TRIGGER refuse_older_epoch BEFORE INSERT ON facts WHEN NEW.epoch < (SELECT max(epoch) FROM epochs WHERE instance IN ('run', NEW.instance))
BEGIN SELECT RAISE(ABORT, 'stale epoch'); END;
CREATE TRIGGER note_newer_epoch AFTER INSERT ON facts WHEN NEW.epoch > coalesce((SELECT max(epoch) FROM epochs WHERE instance IN ('run', NEW.instance)), 0)
BEGIN INSERT OR REPLACE INTO epochs VALUES (NEW.instance, NEW.epoch); END;
PRAGMA user_version=2;
