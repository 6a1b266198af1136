CHECKPOINT_FILES = inputs.checkpoint_files(CONFIG)


rule ingest:
    input:
        inputs.declared(CHECKPOINT_FILES),
    output:
        "ingest.json",
    log:
        "logs/ingest.log",
    benchmark:
        "benchmarks/ingest.tsv"
    threads: 1
    resources:
        mem_mb=mem_mb("ingest"),
        runtime=runtime("ingest"),
    params:
        code=commands.code(CONFIG, "ingest"),
        files=inputs.stamps(CONFIG, CHECKPOINT_FILES),
        settings=commands.settings(
            CONFIG,
            "ingest",
            model=CONFIG.checkpoint,
            name=CONFIG.model.name,
            revision=CONFIG.model.revision,
            license=CONFIG.model.license,
        ),
        records="",
    shell:
        commands.job("ingest")
