"""Algorithms 3.2.1, 3.3.1, 4.1.1, 4.2.1 and 4.3.1 of A. Caterini's thesis (2017), line by line.

"A Novel Mathematical Framework for the Analysis of Neural Networks", with numpy alone. Nothing here
uses coadjoint or torch. One point (x, y) at a time; indices count from 1 as in the text, so that
states, parameters and errors are dicts by layer. Numbers in brackets are the text's equations and
lines. Where the text is misprinted the corrected line says so.

Every algorithm returns theta after its step, as in the text, and the gradients that made the step.
"""

from __future__ import annotations

import copy

import numpy as np

# --- 2.4 and Table 4.1: elementwise functions psi, psi', psi''


def tanh(x):
    return np.sinh(x) / np.cosh(x)


def tanh_1(x):
    return 4 * np.cosh(x) ** 2 / (np.cosh(2 * x) + 1) ** 2


def tanh_2(x):
    return -2 * tanh(x) * tanh_1(x)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def sigmoid_1(x):
    return sigmoid(x) * (1 - sigmoid(x))


def sigmoid_2(x):
    return sigmoid_1(x) * (1 - 2 * sigmoid(x))


def relu(x):
    return np.maximum(0, x)


def heaviside(x):
    return np.where(x > 0, 1.0, 0.0)


PSI = {
    "tanh": (tanh, tanh_1, tanh_2),
    "sigmoid": (sigmoid, sigmoid_1, sigmoid_2),
    "relu": (relu, heaviside, np.zeros_like),
    "identity": (lambda x: x, np.ones_like, np.zeros_like),
}


def softmax(x):
    """(2.15)"""
    return np.exp(x) / np.sum(np.exp(x))


def inner(a, b):
    """<a, b>, the sum over all entries."""
    return float(np.sum(a * b))


def D_softmax(x, v):
    """Lemma 2.4.3"""
    return softmax(x) * v - inner(softmax(x), v) * softmax(x)


# --- 4.2.1: cropping, embedding, convolution, pooling. A point of R^{n x l} (x) R^m is [m, n, l].


def gamma(k, l, step):
    """(4.17)"""
    return 1 + (k - 1) * step, 1 + (l - 1) * step


def kappa(x_j, k, l, p, q):
    """(4.13): the p x q submatrix of x_j that begins at (k, l)."""
    return x_j[k - 1 : k - 1 + p, l - 1 : l - 1 + q]


def embedding(y, k, l, n, width):
    """(4.14): y in the zero matrix of n x width, beginning at (k, l)."""
    whole = np.zeros((n, width))
    p, q = y.shape
    whole[k - 1 : k - 1 + p, l - 1 : l - 1 + q] = y
    return whole


class Convolution:
    """C of (4.15), bilinear in W and x, with its two adjoints.

    summed: the crops K of (4.12) are summed over the channels of x, and W is [m2, p, q]; otherwise
    every channel has its own filter, K keeps the channels apart, and W is [m2, m1, p, q].
    """

    def __init__(self, stride=1, summed=True):
        self.stride = stride
        self.summed = summed

    def places(self, W, x):
        """(k, l) of the result, and their number in both directions (footnote 4, corrected)."""
        p, q = W.shape[-2:]
        n_hat = (x.shape[1] - p) // self.stride + 1
        l_hat = (x.shape[2] - q) // self.stride + 1
        return [(k, l) for k in range(1, n_hat + 1) for l in range(1, l_hat + 1)], (n_hat, l_hat)

    def K(self, x, k, l, p, q):
        """(4.12) at gamma(k, l, stride)"""
        crops = [kappa(x_j, *gamma(k, l, self.stride), p, q) for x_j in x]
        return sum(crops) if self.summed else np.stack(crops)

    def K_star(self, y, k, l, x):
        """Lemma 4.2.1: the same embedding into every channel, or each channel's own."""
        m, n, width = x.shape
        parts = [y] * m if self.summed else list(y)
        return np.stack([embedding(part, *gamma(k, l, self.stride), n, width) for part in parts])

    def __call__(self, W, x):
        """(4.15), (4.16)"""
        places, sizes = self.places(W, x)
        p, q = W.shape[-2:]
        result = np.zeros((len(W), *sizes))
        for j, W_j in enumerate(W):
            for k, l in places:
                result[j, k - 1, l - 1] = inner(W_j, self.K(x, k, l, p, q))
        return result

    def by_W(self, W, x, y):
        """(C |_ x)* y, Theorem 4.2.2"""
        places, _ = self.places(W, x)
        p, q = W.shape[-2:]
        result = np.zeros_like(W)
        for j in range(len(W)):
            for k, l in places:
                result[j] += y[j, k - 1, l - 1] * self.K(x, k, l, p, q)
        return result

    def by_x(self, W, x, y):
        """(W _| C)* y, Theorem 4.2.3"""
        places, _ = self.places(W, x)
        result = np.zeros_like(x)
        for j, W_j in enumerate(W):
            for k, l in places:
                result += y[j, k - 1, l - 1] * self.K_star(W_j, k, l, x)
        return result


class MaxPooling:
    """Phi of (4.18) over disjoint r x r regions; r = 1 is the identity of the last layer."""

    def __init__(self, r):
        self.r = r

    def where(self, y_j, k, l):
        """gamma'(k, l, k*, l*, r), (4.23) and (4.25); the first of several maxima."""
        region = kappa(y_j, *gamma(k, l, self.r), self.r, self.r)
        row, column = np.unravel_index(np.argmax(region), region.shape)
        return int(row) + 1 + (k - 1) * self.r, int(column) + 1 + (l - 1) * self.r

    def chosen(self, y):
        """(j, k, l, row, column) of every region."""
        m, n, width = y.shape
        for j in range(m):
            for k in range(1, n // self.r + 1):
                for l in range(1, width // self.r + 1):
                    yield j, k, l, *self.where(y[j], k, l)

    def __call__(self, y):
        """(4.18), (4.19)"""
        return self.D(y, y)

    def D(self, y, v):
        """(4.24)"""
        m, n, width = y.shape
        result = np.zeros((m, n // self.r, width // self.r))
        for j, k, l, row, column in self.chosen(y):
            result[j, k - 1, l - 1] = v[j, row - 1, column - 1]
        return result

    def D_star(self, y, z):
        """(4.26), (4.27)"""
        result = np.zeros_like(y)
        for j, k, l, row, column in self.chosen(y):
            result[j, row - 1, column - 1] += z[j, k - 1, l - 1]
        return result


# --- 3.1: layers f_i(x; theta_i) for the two generic algorithms. theta_i is a dict of arrays.
# D, D_star, nabla_star and the two of second order, D2_star = (v _| D^2 f)* and
# D_nabla_star = (v _| D nabla f)*.


class MLPLayer:
    """(4.1); first derivatives by Lemmas 4.1.2 and 4.1.3, second ones by (2.14)."""

    def __init__(self, psi):
        self.psi, self.psi_1, self.psi_2 = PSI[psi]

    def z(self, x, theta):
        return theta["W"] @ x + theta["b"]

    def f(self, x, theta):
        return self.psi(self.z(x, theta))

    def D(self, x, theta, v):
        return self.psi_1(self.z(x, theta)) * (theta["W"] @ v)

    def D_star(self, x, theta, w):
        return theta["W"].T @ (self.psi_1(self.z(x, theta)) * w)

    def nabla_star(self, x, theta, w):
        u = self.psi_1(self.z(x, theta)) * w
        return {"W": np.outer(u, x), "b": u}

    def D2_star(self, x, theta, v, w):
        return theta["W"].T @ (self.psi_2(self.z(x, theta)) * (theta["W"] @ v) * w)

    def D_nabla_star(self, x, theta, v, w):
        z = self.z(x, theta)
        bent = self.psi_2(z) * (theta["W"] @ v) * w
        return {"W": np.outer(bent, x) + np.outer(self.psi_1(z) * w, v), "b": bent}


class CNNLayer:
    """(4.28); first derivatives by (4.30) to (4.33), their hooks exchanged; second by (2.14)."""

    def __init__(self, psi, stride=1, r=1, summed=True):
        self.psi, self.psi_1, self.psi_2 = PSI[psi]
        self.C = Convolution(stride, summed)
        self.Phi = MaxPooling(r)

    def f(self, x, theta):
        return self.Phi(self.psi(self.C(theta["W"], x)))

    def D(self, x, theta, v):
        c = self.C(theta["W"], x)
        return self.Phi.D(self.psi(c), self.psi_1(c) * self.C(theta["W"], v))

    def D_star(self, x, theta, w):
        c = self.C(theta["W"], x)
        return self.C.by_x(theta["W"], x, self.psi_1(c) * self.Phi.D_star(self.psi(c), w))

    def nabla_star(self, x, theta, w):
        c = self.C(theta["W"], x)
        y = self.psi_1(c) * self.Phi.D_star(self.psi(c), w)
        return {"W": self.C.by_W(theta["W"], x, y)}

    def D2_star(self, x, theta, v, w):
        c = self.C(theta["W"], x)
        u = self.Phi.D_star(self.psi(c), w)
        bent = self.psi_2(c) * self.C(theta["W"], v) * u
        return self.C.by_x(theta["W"], x, bent)

    def D_nabla_star(self, x, theta, v, w):
        W = theta["W"]
        c = self.C(W, x)
        u = self.Phi.D_star(self.psi(c), w)
        bent = self.psi_2(c) * self.C(W, v) * u
        return {"W": self.C.by_W(W, x, bent) + self.C.by_W(W, v, self.psi_1(c) * u)}


class WithoutParameters:
    def nabla_star(self, x, theta, w):
        return {}

    def D_nabla_star(self, x, theta, v, w):
        return {}


class FlattenLayer(WithoutParameters):
    def f(self, x, theta):
        return x.reshape(-1)

    def D(self, x, theta, v):
        return v.reshape(-1)

    def D_star(self, x, theta, w):
        return w.reshape(x.shape)

    def D2_star(self, x, theta, v, w):
        return np.zeros_like(x)


class SoftmaxLayer(WithoutParameters):
    """(2.15), Lemma 2.4.3; D^2 sigma.(v, u) is D(D_softmax(., u)).v by the product rule."""

    def f(self, x, theta):
        return softmax(x)

    def D(self, x, theta, v):
        return D_softmax(x, v)

    def D_star(self, x, theta, w):
        return D_softmax(x, w)

    def D2_star(self, x, theta, v, w):
        s, ds = softmax(x), D_softmax(x, v)
        return ds * w - inner(ds, w) * s - inner(s, w) * ds


class LogSoftmaxLayer(WithoutParameters):
    """Log o sigma, Lemma 2.4.4"""

    def f(self, x, theta):
        return np.log(softmax(x))

    def D(self, x, theta, v):
        return v - inner(softmax(x), v)

    def D_star(self, x, theta, w):
        return w - np.sum(w) * softmax(x)

    def D2_star(self, x, theta, v, w):
        return -np.sum(w) * D_softmax(x, v)


class ResidualLayer:
    """x + f(x)"""

    def __init__(self, layer):
        self.layer = layer

    def f(self, x, theta):
        return x + self.layer.f(x, theta)

    def D(self, x, theta, v):
        return v + self.layer.D(x, theta, v)

    def D_star(self, x, theta, w):
        return w + self.layer.D_star(x, theta, w)

    def nabla_star(self, x, theta, w):
        return self.layer.nabla_star(x, theta, w)

    def D2_star(self, x, theta, v, w):
        return self.layer.D2_star(x, theta, v, w)

    def D_nabla_star(self, x, theta, v, w):
        return self.layer.D_nabla_star(x, theta, v, w)


# --- the algorithms


def step(theta_i, eta, gradient):
    """theta_i - eta gradient, for a dict of arrays."""
    return {name: value - eta * gradient[name] for name, value in theta_i.items()}


def grad_step_nn(f, x_, y, theta, eta, kind):
    """Algorithm 3.2.1. f: layers by number; theta: dicts of arrays by number."""
    L = len(f)
    theta = copy.deepcopy(theta)
    x, e, old, nabla_J = {}, {}, {}, {}
    x[1] = x_  # 2
    for i in range(1, L + 1):  # 3
        x[i + 1] = f[i].f(x[i], theta[i])  # 4
    for i in range(L, 0, -1):  # 5
        old[i] = theta[i]  # 6
        if i == L and kind == "regression":  # 7
            e[L] = x[L + 1] - y  # 8
        elif i == L and kind == "classification":  # 9
            e[L] = softmax(x[L + 1]) - y  # 10
        else:
            e[i] = f[i + 1].D_star(x[i + 1], old[i + 1], e[i + 1])  # 12
        nabla_J[i] = f[i].nabla_star(x[i], theta[i], e[i])  # 13
        theta[i] = step(theta[i], eta, nabla_J[i])  # 14
    return theta, nabla_J  # 15


def grad_desc_high_order_nn(f, x_, y, v_, beta, theta, eta, mu):
    """Algorithm 3.3.1. f: layers by number; theta: dicts of arrays by number."""
    L = len(f)
    theta = copy.deepcopy(theta)
    x, v, e_t, e_v, e_y, old = {}, {}, {}, {}, {}, {}
    nabla_J, nabla_R = {}, {}
    x[1] = x_  # 2
    v[1] = v_  # 3
    for i in range(1, L + 1):  # 4
        x[i + 1] = f[i].f(x[i], theta[i])  # 5
        v[i + 1] = f[i].D(x[i], theta[i], v[i])  # 6
    for i in range(L, 0, -1):  # 7
        old[i] = theta[i]  # 8
        if i == L:  # 9
            e_t[L] = np.zeros_like(x[L + 1])  # 10
            e_v[L] = v[L + 1] - beta  # 11
            e_y[L] = x[L + 1] - y  # 12
        else:
            above, point = f[i + 1], (x[i + 1], old[i + 1])
            pulled = above.D_star(*point, e_t[i + 1])
            e_t[i] = pulled + above.D2_star(*point, v[i + 1], e_v[i + 1])  # 14
            e_v[i] = above.D_star(*point, e_v[i + 1])  # 15
            e_y[i] = above.D_star(*point, e_y[i + 1])  # 16
        nabla_J[i] = f[i].nabla_star(x[i], theta[i], e_y[i])  # 17
        first = f[i].nabla_star(x[i], theta[i], e_t[i])
        second = f[i].D_nabla_star(x[i], theta[i], v[i], e_v[i])
        nabla_R[i] = {name: first[name] + second[name] for name in first}  # 18
        total = {name: nabla_J[i][name] + mu * nabla_R[i][name] for name in first}
        theta[i] = step(theta[i], eta, total)  # 19
    return theta, (nabla_J, nabla_R)  # 20


def grad_desc_mlp(x_, y, theta, kind, eta, psi):
    """Algorithm 4.1.1. theta: {"W": by number, "b": by number}; psi: names by number."""
    theta = copy.deepcopy(theta)
    W, b = theta["W"], theta["b"]
    L = len(W)
    x, z, e, old, nabla_b, nabla_W = {}, {}, {}, {}, {}, {}
    x[1] = x_  # 2
    for i in range(1, L + 1):  # 3
        z[i] = W[i] @ x[i] + b[i]  # 4
        x[i + 1] = PSI[psi[i]][0](z[i])  # 5
    for i in range(L, 0, -1):  # 6
        old[i] = W[i]  # 7
        if i == L and kind == "regression":  # 8
            e[L] = x[L + 1] - y  # 9
        elif i == L and kind == "classification":  # 10
            e[L] = softmax(x[L + 1]) - y  # 11
        else:
            e[i] = old[i + 1].T @ (PSI[psi[i + 1]][1](z[i + 1]) * e[i + 1])  # 13
        nabla_b[i] = PSI[psi[i]][1](z[i]) * e[i]  # 14
        nabla_W[i] = np.outer(PSI[psi[i]][1](z[i]) * e[i], x[i])  # 15
        b[i] = b[i] - eta * nabla_b[i]  # 16
        W[i] = W[i] - eta * nabla_W[i]  # 17
    return theta, {"W": nabla_W, "b": nabla_b}  # 18


def grad_desc_cnn(x_, y, W, kind, eta, psi, C, Phi):
    """Algorithm 4.2.1. W: filters by number; C and Phi: convolutions and poolings by number.

    Line 5 prints Phi for Phi_i. y has the shape of the output, [m_{L+1}, 1, 1].
    """
    W = copy.deepcopy(W)
    L = len(W)
    x, z, e, old, nabla_W = {}, {}, {}, {}, {}
    x[1] = x_  # 2
    for i in range(1, L + 1):  # 3
        z[i] = PSI[psi[i]][0](C[i](W[i], x[i]))  # 4
        x[i + 1] = Phi[i](z[i])  # 5
    for i in range(L, 0, -1):  # 6
        old[i] = W[i]  # 7
        if i == L and kind == "regression":  # 8
            e[L] = x[L + 1] - y  # 9
        elif i == L and kind == "classification":  # 10
            e[L] = softmax(x[L + 1]) - y  # 11
        else:
            slope = PSI[psi[i + 1]][1](C[i + 1](old[i + 1], x[i + 1]))
            below_pool = slope * Phi[i + 1].D_star(z[i + 1], e[i + 1])
            e[i] = C[i + 1].by_x(old[i + 1], x[i + 1], below_pool)  # 13
        slope = PSI[psi[i]][1](C[i](W[i], x[i]))
        nabla_W[i] = C[i].by_W(W[i], x[i], slope * Phi[i].D_star(z[i], e[i]))  # 15
        W[i] = W[i] - eta * nabla_W[i]  # 17
    return W, nabla_W  # 18


def grad_desc_dae(x_, theta, loss, eta, psi, tau, tau_star, printed=False):
    """Algorithm 4.3.1. tau, tau_star: functions by number, for i > L.

    Line 14 prints sigma(x_{2L+1}) - x, which holds for <1, x> = 1 alone; printed: use it all the
    same. K_i is a copy, since line 23 changes W_i before line 16 reads K_{i+1}.
    """
    theta = copy.deepcopy(theta)
    W, b = theta["W"], theta["b"]
    L = len(W)

    def xi(i):
        return 2 * L - i + 1  # (4.34)

    x, z, e, K, nabla_W, nabla_b = {}, {}, {}, {}, {}, {}
    x[1] = x_  # 2
    for i in range(1, 2 * L + 1):  # 3
        if i <= L:  # 4
            K[i] = W[i].copy()  # 5
        else:
            K[i] = tau[i](W[xi(i)]).copy()  # 7
        z[i] = K[i] @ x[i] + b[i]  # 8
        x[i + 1] = PSI[psi[i]][0](z[i])  # 9
    for i in range(2 * L, 0, -1):  # 10
        if i == 2 * L and loss == "squared":  # 11
            e[2 * L] = x[2 * L + 1] - x_  # 12
        elif i == 2 * L and loss == "cross-entropy":  # 13
            total = 1.0 if printed else np.sum(x_)
            e[2 * L] = total * softmax(x[2 * L + 1]) - x_  # 14
        else:
            e[i] = K[i + 1].T @ (PSI[psi[i + 1]][1](z[i + 1]) * e[i + 1])  # 16
        nabla_b[i] = PSI[psi[i]][1](z[i]) * e[i]  # 17
        b[i] = b[i] - eta * nabla_b[i]  # 18
        if i > L:  # 19
            nabla_W[xi(i)] = tau_star[i](np.outer(PSI[psi[i]][1](z[i]) * e[i], x[i]))  # 20
        else:
            nabla_W[i] = nabla_W[i] + np.outer(PSI[psi[i]][1](z[i]) * e[i], x[i])  # 22
            W[i] = W[i] - eta * nabla_W[i]  # 23
    return theta, {"W": nabla_W, "b": nabla_b}  # 24
