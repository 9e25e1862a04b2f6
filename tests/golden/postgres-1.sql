-- The tables of format 1 in PostgreSQL, as they were made.
CREATE SCHEMA IF NOT EXISTS ensemble_ray;
CREATE TABLE ensemble_ray.format (version integer NOT NULL);
CREATE TABLE ensemble_ray.runs (
    run_id text PRIMARY KEY,
    begun uuid NOT NULL,
    created_at timestamptz NOT NULL,
    origin text NOT NULL,
    state text NOT NULL,
    epoch bigint NOT NULL DEFAULT 0,
    owner text NOT NULL DEFAULT '',
    cancel_asked boolean NOT NULL DEFAULT false
) WITH (fillfactor = 70);
CREATE TABLE ensemble_ray.facts (
    run_id text NOT NULL,
    seq bigint NOT NULL,
    kind text NOT NULL,
    name text NOT NULL,
    instance text NOT NULL,
    at double precision NOT NULL,
    epoch bigint NOT NULL,
    data text NOT NULL,
    PRIMARY KEY (run_id, seq)
);
CREATE INDEX facts_of_instance ON ensemble_ray.facts (run_id, instance);
CREATE TABLE ensemble_ray.bodies (
    run_id text NOT NULL,
    sha256 bytea NOT NULL,
    body bytea NOT NULL,
    PRIMARY KEY (run_id, sha256)
);
CREATE TABLE ensemble_ray.epochs (
    run_id text NOT NULL,
    instance text NOT NULL,
    epoch bigint NOT NULL,
    PRIMARY KEY (run_id, instance)
);
CREATE TABLE ensemble_ray.writers (
    run_id text NOT NULL,
    writer uuid NOT NULL,
    written bigint NOT NULL,
    PRIMARY KEY (run_id, writer)
) WITH (fillfactor = 70);
CREATE FUNCTION ensemble_ray.append_facts(
    of_run text, of_begun uuid, by_writer uuid,
    entries bigint[], numbers bigint[], kinds text[], names text[], instances text[], ats double precision[],
    epochs bigint[], data text[], digests bytea[], texts bytea[]
) RETURNS TABLE (entry bigint, instance text, newest bigint) LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    run_epoch bigint;
    highest_of_run bigint;
    last_seq bigint;
    already bigint;
    refused bigint[];
BEGIN
    SELECT r.epoch INTO run_epoch FROM ensemble_ray.runs r WHERE r.run_id = of_run AND r.begun = of_begun FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN QUERY SELECT NULL::bigint, NULL::text, NULL::bigint;
        RETURN;
    END IF;
    SELECT coalesce(max(f.seq), 0) INTO last_seq FROM ensemble_ray.facts f WHERE f.run_id = of_run;
    SELECT coalesce(max(w.written), 0) INTO already
        FROM ensemble_ray.writers w WHERE w.run_id = of_run AND w.writer = by_writer;

    RETURN QUERY
        SELECT g.entry, g.instance, greatest(run_epoch, e.epoch)
        FROM unnest(entries, instances, epochs) AS g (entry, instance, epoch)
        LEFT JOIN ensemble_ray.epochs e ON e.run_id = of_run AND e.instance = g.instance
        WHERE g.epoch < greatest(run_epoch, e.epoch);
    IF FOUND THEN
        SELECT array_agg(DISTINCT g.entry) INTO refused
            FROM unnest(entries, instances, epochs) AS g (entry, instance, epoch)
            LEFT JOIN ensemble_ray.epochs e ON e.run_id = of_run AND e.instance = g.instance
            WHERE g.epoch < greatest(run_epoch, e.epoch);
    END IF;

    INSERT INTO ensemble_ray.bodies SELECT of_run, b.* FROM unnest(digests, texts) AS b ON CONFLICT DO NOTHING;
    INSERT INTO ensemble_ray.facts
        SELECT of_run, last_seq + row_number() OVER (ORDER BY g.number),
            g.kind, g.name, g.instance, g.at, g.epoch, g.data
        FROM unnest(entries, numbers, kinds, names, instances, ats, epochs, data)
            AS g (entry, number, kind, name, instance, at, epoch, data)
        WHERE g.number > already AND (refused IS NULL OR g.entry <> ALL (refused));

    SELECT max(g.epoch) INTO highest_of_run FROM unnest(entries, instances, epochs) AS g (entry, instance, epoch)
        WHERE g.instance = 'run' AND (refused IS NULL OR g.entry <> ALL (refused));
    IF highest_of_run > run_epoch THEN
        run_epoch := highest_of_run;
        UPDATE ensemble_ray.runs r SET epoch = run_epoch WHERE r.run_id = of_run;
    END IF;
    INSERT INTO ensemble_ray.epochs AS e
        SELECT of_run, g.instance, max(g.epoch)
        FROM unnest(entries, instances, epochs) AS g (entry, instance, epoch)
        WHERE g.epoch > run_epoch AND (refused IS NULL OR g.entry <> ALL (refused))
        GROUP BY g.instance
        ON CONFLICT (run_id, instance) DO UPDATE SET epoch = greatest(e.epoch, excluded.epoch);
    INSERT INTO ensemble_ray.writers AS w VALUES (of_run, by_writer, (SELECT max(n) FROM unnest(numbers) AS n))
        ON CONFLICT (run_id, writer) DO UPDATE SET written = greatest(w.written, excluded.written);
END $$;
INSERT INTO ensemble_ray.format VALUES (1);
