"""Serves a model with llama.cpp's own HTTP server, on loopback and without a GPU, until it is told to end.

    python serve.py MODEL.gguf ADDRESS PORT

Its first line says that it listens.
"""

import signal
import sys

import xllamacpp

# Requests at a time; more wait in line.
SLOTS = 4


def main(model, address, port):
    signals = {signal.SIGTERM, signal.SIGINT}
    # Before there are threads, which inherit it: only sigwait is to see these.
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.model_alias = ["tiny"]
    params.hostnames = [address]
    params.port = port
    params.n_parallel = SLOTS
    params.n_ctx = SLOTS * 8192
    params.endpoint_metrics = True
    params.endpoint_slots = True
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    params.warmup = False
    # In f16 and by flash attention, what is computed beside a request changes 1 of 500 answers; so none of 2000.
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    print(f"listening at {server.listening_address}", flush=True)
    signal.sigwait(signals)


main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
