"""Trace formats: each one's lines as published, and the laws of all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import pytest

from tests.traces.format_conformance import (
    BLOCKS,
    MODELS,
    FormatConformance,
    RequestFormatConformance,
    every_suite,
    streams,
    write,
)
from traces.formats import FORMATS
from traces.formats.azure import AZURE
from traces.formats.burstgpt import BURSTGPT
from traces.formats.mooncake import MOONCAKE
from traces.formats.plain_csv import CSV
from traces.formats.servegen_folder import SERVEGEN_FOLDER
from traces.formats.servegen_series import SERVEGEN_CLIENTS, SERVEGEN_RATE
from traces.request import Request

CSV_HEADER = "arrival_s,input_tokens,output_tokens\n"
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
BURST_2 = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def test_every_format_conforms() -> None:
    """Each line of the registry has a subclass of a suite, and each subclass a line."""
    assert sorted(suite.format.name for suite in every_suite()) == sorted(FORMATS)


class TestCsv(RequestFormatConformance):
    format = CSV
    published: ClassVar = {
        "csv": (
            CSV_HEADER + "0.0000000,374,44\n4.3145790,396,109\n",
            [Request(0.0, 374, 44), Request(4.314579, 396, 109)],
        ),
        "csv with blocks": (
            "arrival_s,input_tokens,output_tokens,prefix_block_ids\n0.000,700,6,0 1\n0.040,512,4,0\n",
            [Request(0.0, 700, 6, "", (0, 1)), Request(0.04, 512, 4, "", (0,))],
        ),
        "csv with models, other order, byte order mark, Windows line ends": (
            "\ufeffmodel,output_tokens,input_tokens,arrival_s\r\nm,1,2,3.5\r\n",
            [Request(3.5, 2, 1, "m")],
        ),
    }
    step_s, from_first, writable = 0.0, False, streams(models=MODELS, blocks=BLOCKS)


class TestAzure(RequestFormatConformance):
    format = AZURE
    published: ClassVar = {
        "azure 2023": (
            AZURE_HEADER + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n",
            [Request(0.0, 374, 44), Request(4.314579, 396, 109)],
        ),
        "azure over midnight": (
            AZURE_HEADER + "2023-12-31 23:59:59.9999999,1,1\n2024-01-01 00:00:00.0000001,2,2\n",
            [Request(0.0, 1, 1), Request(2e-7, 2, 2)],
        ),
        "azure 2024, with an offset and whole seconds": (
            AZURE_HEADER + "2024-05-12 00:00:00+00:00,1,1\n2024-05-12 02:00:10.25+02:00,2,2\n",
            [Request(0.0, 1, 1), Request(10.25, 2, 2)],
        ),
        "azure multimodal": (
            "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-10-15 00:00:00.0000000,2,900,120\n",
            [Request(0.0, 900, 120)],
        ),
    }
    step_s, from_first, writable = 1e-7, True, streams()


class TestMooncake(RequestFormatConformance):
    format = MOONCAKE
    published: ClassVar = {
        "mooncake": (
            '{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n'
            '{"timestamp": 3000, "input_length": 7322, "output_length": 490, "hash_ids": [0, 14]}\n',
            [Request(0.0, 6758, 500, "", (0, 1)), Request(3.0, 7322, 490, "", (0, 14))],
        ),
    }
    step_s, from_first, writable = 1e-9, False, streams(blocks=BLOCKS)


class TestBurstGpt(RequestFormatConformance):
    format = BURSTGPT
    published: ClassVar = {
        "burstgpt 1": (
            BURST + "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,230,1317,API log\n",
            [Request(0.0, 472, 18, "ChatGPT"), Request(40.0, 1087, 230, "GPT-4")],
        ),
        "burstgpt 2, a failed request between": (
            BURST_2
            + "19440110.0,1722ac82,43,GPT-4,906,446,1352,Conversation log\n"
            + "19440161.0,,2,ChatGPT,36,0,36,API log\n"
            + "19440161.0,,2,ChatGPT,36,29,65,API log\n",
            [Request(0.0, 906, 446, "GPT-4"), Request(51.0, 36, 29, "ChatGPT")],
        ),
    }
    step_s, from_first, writable = 1e-9, True, streams(models=MODELS.filter(bool))


class TestServegenRate(FormatConformance):
    format = SERVEGEN_RATE

    @pytest.fixture
    def trace(self, tmp_path: Path) -> Path:
        quantiles = "p1,p5,p10,p25,p50,p75,p90,p95,p99,p99.9"
        rows = "".join(f"0,{side},1,1,2,2,3,4,5,6,7,8\n" for side in ("input_tokens", "output_tokens"))
        write(tmp_path, f"window_start_s,field,{quantiles}\n{rows}", "day_lengths.csv")
        return write(tmp_path, "t_s,rate_rps,active_clients\n0,0.5,3\n600,1,3\n", "day_rate.csv")


class TestServegenClients(FormatConformance):
    format = SERVEGEN_CLIENTS

    @pytest.fixture
    def trace(self, tmp_path: Path) -> Path:
        header = "client_id,rate_rps,pattern,shape,in_mean,in_p50,in_p95,in_p99,out_mean,out_p50,out_p95,out_p99"
        return write(tmp_path, f"{header}\n7,0.5,Gamma,0.8,5,4,9,12,3,2,6,8\n")


class TestServegenFolder(FormatConformance):
    format = SERVEGEN_FOLDER

    @pytest.fixture
    def trace(self, tmp_path: Path) -> Path:
        folder = tmp_path / "clients"
        folder.mkdir()
        write(folder, "0,0.5,1.0,Gamma,1.0,2.0\n", "chunk-0-trace.csv")
        lengths = {"0": {"input_tokens": "{10: 1.0}", "output_tokens": "{3: 1.0}"}}
        write(folder, json.dumps(lengths), "chunk-0-dataset.json")
        return folder
