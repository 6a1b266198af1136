rule ingest:
    input:
        settings.checkpoint_files(CONFIG),
    output:
        f"{MODEL}/ingest.json",
    log:
        f"{MODEL}/logs/ingest.log",
    benchmark:
        f"{MODEL}/benchmarks/ingest.tsv"
    threads: 1
    params:
        code=code("ingest"),
        settings=flags(
            "ingest",
            model=CONFIG.model.source,
            name=CONFIG.model.name,
            revision=CONFIG.model.revision,
            license=CONFIG.model.license,
        ),
    shell:
        job("ingest") + " 2> {log:q}"
