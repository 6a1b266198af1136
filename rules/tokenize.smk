rule tokenize:
    input:
        settings.corpus_files(CONFIG),
        model=f"{MODEL}/ingest.json",
    output:
        f"{MODEL}/tokenize.json",
    log:
        f"{MODEL}/logs/tokenize.log",
    benchmark:
        f"{MODEL}/benchmarks/tokenize.tsv"
    threads: 1
    params:
        code=stage_digest("tokenize"),
        corpus=CONFIG.corpus,
        corpus_revision=CONFIG.corpus_revision,
        calibration_tokens=CONFIG.calibration_tokens,
        seed=CONFIG.seed,
    shell:
        RUN + " tokenize --corpus {params.corpus:q}" + CORPUS_REVISION_FLAG + " --calibration-tokens {params.calibration_tokens}"
        " --seed {params.seed} --model {input.model:q} --output {output:q} 2> {log:q}"
