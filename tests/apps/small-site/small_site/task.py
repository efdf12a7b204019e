"""The model, the data and the training loop."""

import torch
import torchvision
from torch.utils.data import DataLoader, Subset
from torchvision import datasets

preprocess = torchvision.transforms.Compose(
    [
        torchvision.transforms.Resize(64),
        torchvision.transforms.ToTensor(),
        torchvision.transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    ]
)


def make_model():
    return torchvision.models.VisionTransformer(
        image_size=64, patch_size=8, num_layers=6, num_heads=4, hidden_dim=192, mlp_dim=384, num_classes=10
    )


def load_data(partition_id, num_partitions, batch_size):
    train = datasets.CIFAR10("data", train=True, download=True, transform=preprocess)
    test = datasets.CIFAR10("data", train=False, download=True, transform=preprocess)
    mine = [list(range(partition_id, len(part), num_partitions)) for part in (train, test)]
    return (
        DataLoader(Subset(train, mine[0]), batch_size=batch_size, shuffle=True),
        DataLoader(Subset(test, mine[1]), batch_size=16),
    )


def train(model, loader, steps, lr, device):
    model.to(device).train()
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    total = 0.0
    for _, (images, labels) in zip(range(steps), loader, strict=False):
        optimizer.zero_grad()
        loss = criterion(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / steps


def test(model, loader, device):
    model.to(device).eval()
    correct, loss, count = 0, 0.0, 0
    with torch.no_grad():
        for images, labels in loader:
            outputs = model(images.to(device))
            loss += torch.nn.functional.cross_entropy(outputs, labels.to(device)).item()
            correct += (outputs.argmax(1).cpu() == labels).sum().item()
            count += len(labels)
    return loss / len(loader), correct / count
