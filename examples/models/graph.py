"""A model file: a graph network: messages along edges, added up at nodes, a class for every node.

Edges read the nodes at both ends (`index`), nodes gather the messages that reach them (`index_add`). One graph is one
batch: nodes and edges are its two batch dims. Worth cutting: nodes and edges (a node's sum is then complete only after
an exchange), the hidden dims of all perceptrons.
"""

import torch
from torch import nn
from torch.nn import functional as F

NODES, EDGES, NODE_FEATURES, EDGE_FEATURES, CLASSES = 36, 120, 12, 6, 6
WIDTH, LAYERS = 24, 3


class Perceptron(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.up = nn.Linear(inputs, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, outputs)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.dropout(F.silu(self.up(x))))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.edge = Perceptron(3 * WIDTH, WIDTH)
        self.node = Perceptron(2 * WIDTH, WIDTH)
        self.edge_norm, self.node_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(
        self, nodes: torch.Tensor, edges: torch.Tensor, start: torch.Tensor, stop: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        messages = self.edge(torch.cat([nodes[start], nodes[stop], edges], -1))
        edges = self.edge_norm(edges + messages)
        arrived = torch.zeros_like(nodes).index_add(0, stop, messages)
        number = torch.zeros(len(nodes), 1, dtype=nodes.dtype, device=nodes.device)
        number = number.index_add(0, stop, torch.ones_like(messages[:, :1]))
        nodes = self.node_norm(nodes + self.node(torch.cat([nodes, arrived / number.clamp(min=1)], -1)))
        return nodes, edges


class GraphNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read_nodes, self.read_edges = nn.Linear(NODE_FEATURES, WIDTH), nn.Linear(EDGE_FEATURES, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = Perceptron(WIDTH, CLASSES)

    def forward(
        self, features: torch.Tensor, ends: torch.Tensor, edge_features: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        start, stop = ends.unbind(1)
        nodes, edges = self.read_nodes(features), self.read_edges(edge_features)
        for layer in self.layers:
            nodes, edges = layer(nodes, edges, start, stop)
        return F.cross_entropy(self.head(nodes), labels)


def model() -> nn.Module:
    torch.manual_seed(0)
    return GraphNetwork()


def example() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "features": torch.randn(NODES, NODE_FEATURES),
        "ends": torch.randint(NODES, (EDGES, 2)),
        "edge_features": torch.randn(EDGES, EDGE_FEATURES),
        "labels": torch.randint(CLASSES, (NODES,)),
    }
