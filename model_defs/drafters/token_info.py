"""Token-info embedding: logits that the last token adds to the next one's (Lyanna, sections 4.1, 5.1 and 6.1).

RMSNorm(E'(t)) of the last token t is added to the logits, for the K most frequent tokens. E' = W_E W_1 W_2 is low-rank
while it is trained; afterwards a table, or its two factors where that would not fit.
"""

from __future__ import annotations

from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redraft.model_defs.target.model import RMSNorm

EPS = 1e-6
LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448}
"""Scaled value of a row's largest element."""


class InfoForm(StrEnum):
    """Form of token info in a drafter's network: a table in int8, fp8 or bf16, or the low-rank factors."""

    int8 = "int8"
    fp8 = "fp8"
    bf16 = "bf16"
    low_rank = "low_rank"


DTYPES = {InfoForm.int8: torch.int8, InfoForm.fp8: torch.float8_e4m3fn, InfoForm.bf16: torch.bfloat16}


class TokenInfo(nn.Module):
    """The low-rank form."""

    embedding: Tensor
    row_of: Tensor

    def __init__(self, embedding: Tensor, hot_ids: Tensor, kept: int, rank: int):
        """embedding [V, H] is the target's W_E; the first `kept` of `hot_ids` have token info, as rows and columns."""
        super().__init__()
        self.kept = kept
        self.down = nn.Linear(embedding.shape[1], rank, bias=False)
        self.up = nn.Linear(rank, kept, bias=False)
        self.norm = RMSNorm(kept, EPS)
        row_of = torch.full((len(embedding),), kept, dtype=torch.long, device=embedding.device)
        row_of[hot_ids[:kept]] = torch.arange(kept, device=embedding.device)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("row_of", row_of, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [..., K] that tokens int64 [...] add to those of the K tokens; zero for any other token."""
        z, up = self.factors(tokens)
        return F.linear(z, up)

    def factors(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """z [..., rank] and U [K, rank] whose product z U^T is the token info of tokens int64 [...]. The norm's mean
        square of W_2 z is z^T (W_2^T W_2) z / K, so that no row of K exists."""
        hot = (self.row_of[tokens] < self.kept)[..., None]
        z = self.down(F.embedding(tokens, self.embedding)) * hot
        gram = self.up.weight.T @ self.up.weight / self.kept
        mean_square = (F.linear(z, gram) * z).sum(-1, keepdim=True).float()
        return z * torch.rsqrt(mean_square + EPS), self.up.weight * self.norm.weight[:, None]

    @torch.no_grad()
    def collapse(self, dtype: torch.dtype = torch.bfloat16) -> TokenInfoTable:
        """The token info as a table, in bfloat16, float32, or a dtype of LARGEST with a scale for each row."""
        tokens = self.row_of.argsort()[: self.kept]
        rows = torch.cat([self(part) for part in tokens.split(1024)])
        return TokenInfoTable(F.pad(rows, (0, 0, 0, 1)), self.row_of, dtype)

    @torch.no_grad()
    def stored(self, form: InfoForm) -> TokenInfoTable | TokenInfoFactors:
        """The token info in the form that a network holds."""
        if form == InfoForm.low_rank:
            tokens = torch.arange(len(self.row_of), device=self.row_of.device)
            return TokenInfoFactors(*self.factors(tokens))
        return self.collapse(DTYPES[form])


class TokenInfoFactors(nn.Module):
    """The low-rank form, where nothing is left to normalize: also the previous-token head of DSpark."""

    z: Tensor
    up: Tensor

    def __init__(self, z: Tensor, up: Tensor):
        """z [V, rank], zeros for tokens without token info, and up [K, rank]."""
        super().__init__()
        self.register_buffer("z", z)
        self.register_buffer("up", up)

    def factors(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """See `TokenInfo.factors`."""
        return F.embedding(tokens, self.z), self.up

    def stored(self, form: InfoForm) -> TokenInfoFactors:
        """See `TokenInfo.stored`; they are stored as they are."""
        assert form == InfoForm.low_rank
        return self

    def inputs(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Inputs of the operator `TokenInfoTopK` at nodes of these tokens int32 [N]: rows [N, K]."""
        return (F.linear(F.embedding(tokens, self.z), self.up),)


class TokenInfoTable(nn.Module):
    """The collapsed form: a look-up."""

    rows: Tensor
    scales: Tensor
    row_of: Tensor

    def __init__(self, rows: Tensor, row_of: Tensor, dtype: torch.dtype):
        """rows [K + 1, K], the last one zeros; row_of [V] is K for tokens without token info."""
        super().__init__()
        scales = torch.ones_like(rows[:, :1])
        if dtype in LARGEST:
            scales = rows.abs().amax(-1, keepdim=True).clamp(min=EPS) / LARGEST[dtype]
            rows = rows / scales
        if dtype == torch.int8:
            rows = rows.round()
        self.register_buffer("rows", rows.to(dtype))
        self.register_buffer("scales", scales)
        self.register_buffer("row_of", row_of.to(torch.int32))

    def inputs(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Inputs of the operator `TokenInfoTopK`, the same for all tokens."""
        return self.row_of, self.rows, self.scales

    @property
    def nbytes(self) -> int:
        """Memory of the table, its scales and its index."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())

    def forward(self, tokens: Tensor) -> Tensor:
        """Token info float32 [..., K], as the low-rank form gives it."""
        row = F.embedding(tokens, self.row_of[:, None]).squeeze(-1)
        return F.embedding(row, self.rows).float() * F.embedding(row, self.scales)
