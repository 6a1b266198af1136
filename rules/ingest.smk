rule ingest:
    input:
        inputs.declared(inputs.checkpoint_files(CONFIG)),
    output:
        "ingest.json",
    log:
        "logs/ingest.log",
    benchmark:
        "benchmarks/ingest.tsv"
    threads: 1
    params:
        code=code("ingest"),
        files=stamps(*inputs.checkpoint_files(CONFIG)),
        settings=flags(
            "ingest",
            model=CONFIG.checkpoint,
            name=CONFIG.model.name,
            revision=CONFIG.model.revision,
            license=CONFIG.model.license,
        ),
    shell:
        job("ingest") + " 2> {log:q}"
