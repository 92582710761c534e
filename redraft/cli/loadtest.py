"""Load-test the running service, or another."""

from __future__ import annotations

from redraft.cli.service import DEFAULT_RUN_DIR, RunDirOption, running_service
from redraft.loadtest.loadtest import run_load_test
from redraft.loadtest.options import Options, command


@command
def main(options: Options, run_dir: RunDirOption = DEFAULT_RUN_DIR) -> int:
    """Send requests at fixed rates, and say how fast they are answered.

    Addresses, tokenizer and chat template are those of the service that runs from --run-dir, where none are given. With
    --of-saturation and --baseline, auto-regressive decoding by the same service takes turns with the bundle's method.
    """
    if options.url is None and options.worker is None:
        settings = running_service(run_dir, "redraft loadtest")
        ports = {"grpc": settings.grpc_port, "http": settings.http_port, "openai": settings.openai_port}
        options.bundle = options.bundle or settings.bundle
        if options.protocol in ports:
            options.url = f"127.0.0.1:{ports[options.protocol]}"
            page = f"http://127.0.0.1:{settings.metrics_port}/metrics"
            options.metrics_url = page if options.metrics_url is None else options.metrics_url
            if options.baseline and not options.baseline_url and options.of_saturation:
                options.baseline_url, options.baseline_metrics_url = options.url, page
    options.metrics_url = options.metrics_url or ""
    return run_load_test(options)
