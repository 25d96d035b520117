"""Training-step tokens/s of causal Sinkhorn attention with n_it 5, by default at T = 1024 and b =
64, against PyPI's sinkhorn_transformer of the same size (peer_speed.py). That package has no causal
Sinkhorn normalization: its causal path is a softmax over past blocks that keeps the best block (our
`none`, hardened). So `prefix` does more work than the peer, and `none` is printed for comparison.
"""

import peer_speed


def main():
    a = peer_speed.parsed(block=64)
    if a.peer:
        from sinkhorn_transformer import SinkhornTransformerLM

        return peer_speed.run_peer(
            a, lambda: SinkhornTransformerLM(num_tokens=peer_speed.VOCABULARY,
                                             dim=a.channels,
                                             depth=a.layers,
                                             heads=a.heads,
                                             max_seq_len=a.context,
                                             bucket_size=a.block,
                                             causal=True,
                                             reversible=False),
            lambda model, inputs, targets: peer_speed.token_loss(model(inputs), targets))
    peer_speed.compare(
        a, "sinkhorn_transformer", "configs/baby_gpt_sinkhorn.txtpb", {
            mode: "sinkhorn{block:%d causal_balance:%s iterations:5}" % (a.block, mode)
            for mode in ("prefix", "none")
        })


if __name__ == "__main__":
    main()
