"""Training-step tokens/s of a Routing language model, all heads routed, by default at T = 1024 and
window 64 (T / 64 clusters), against PyPI's routing_transformer of the same size (peer_speed.py).
That package has `full_topw` with keys that are the queries; `causal_bucket` is printed for
comparison. Its relative positions are switched off, which makes it faster.
"""

import peer_speed


def main():
    a = peer_speed.parsed(window=64)
    if a.peer:
        from routing_transformer import RoutingTransformerLM

        def loss(model, inputs, targets):
            logits, commitment = model(inputs)
            return peer_speed.token_loss(logits, targets) + commitment

        return peer_speed.run_peer(
            a, lambda: RoutingTransformerLM(num_tokens=peer_speed.VOCABULARY,
                                            dim=a.channels,
                                            depth=a.layers,
                                            heads=a.heads,
                                            max_seq_len=a.context,
                                            window_size=a.window,
                                            dim_head=a.channels // a.heads,
                                            causal=True,
                                            reversible=False,
                                            rel_pos_emb=False,
                                            _register_kmeans_update=True), loss)
    text = "routing{clusters:%d window:%d share_query_key:true causal_selection:%%s}" % (
        a.context // a.window, a.window)
    peer_speed.compare(a, "routing_transformer", "configs/baby_gpt_dense.txtpb",
                       {mode: text % mode for mode in ("full_topw", "causal_bucket")})


if __name__ == "__main__":
    main()
