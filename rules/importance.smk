IMATRIX_FILES = inputs.imatrix_files(CONFIG)


# Runs early, so that a file of another model is refused before any long job.
rule importance:
    input:
        inputs.declared(IMATRIX_FILES),
        model="ingest.json",
    output:
        f"{DEVICE}/importance.json",
    log:
        f"{DEVICE}/logs/importance.log",
    benchmark:
        f"{DEVICE}/benchmarks/importance.tsv"
    priority: 1
    threads: 1
    resources:
        mem_mb=mem_mb("importance"),
        runtime=runtime("importance"),
    params:
        code=commands.code(CONFIG, "importance"),
        files=inputs.stamps(CONFIG, IMATRIX_FILES),
        settings=commands.settings(CONFIG, "importance"),
        records=commands.records,
    shell:
        commands.job("importance")
