CHECKPOINT_FILES = inputs.checkpoint_files(CONFIG)


# Not cached: its result has links to the checkpoint's files, wherever they are on this machine.
rule ingest:
    input:
        local(inputs.declared(CHECKPOINT_FILES)),
    output:
        record=f"{MODEL}/ingest.json",
        arrays=directory(f"{MODEL}/ingest"),
    log:
        f"{MODEL}/logs/ingest.log",
    benchmark:
        f"{MODEL}/benchmarks/ingest.tsv"
    localrule: STORED
    resources:
        **needs("ingest"),
    params:
        **commands.params(
            CONFIG,
            "ingest",
            model=CONFIG.model.source if CONFIG.model.revision else None,
            name=CONFIG.model.name,
            revision=CONFIG.model.revision,
            license=CONFIG.model.license,
        ),
        files=[*inputs.stamps(CONFIG, CHECKPOINT_FILES), *inputs.packages(CONFIG)],
    shell:
        commands.job("ingest", "" if CONFIG.model.revision else "--model {CONFIG.checkpoint:q}")
