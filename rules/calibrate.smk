rule calibrate:
    input:
        model=f"{MODEL}/ingest.json",
        corpus=f"{MODEL}/tokenize.json",
    output:
        f"{MODEL}/calibrate.json",
    log:
        f"{MODEL}/logs/calibrate.log",
    benchmark:
        f"{MODEL}/benchmarks/calibrate.tsv"
    threads: 8
    params:
        code=stage_digest("calibrate"),
        method=CONFIG.method,
    shell:
        RUN + " calibrate --method {params.method} --model {input.model:q}"
        " --corpus {input.corpus:q} --threads {threads} --output {output:q} 2> {log:q}"
