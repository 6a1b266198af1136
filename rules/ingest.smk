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
        code=stage_digest("ingest"),
        model=CONFIG.model.source,
        name=CONFIG.model.name,
        revision=CONFIG.model.revision,
        license=CONFIG.model.license,
    shell:
        RUN
        + " ingest --model {params.model:q} --name {params.name:q}"
        + REVISION_FLAG
        + LICENSE_FLAG
        + " --output {output:q} 2> {log:q}"
