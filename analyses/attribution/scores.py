"""Scores from gradients: pure functions over arrays. Positive = the row promotes the target.

Letters of the brief, 2.3: q = gradient of the target, g_i = gradient of row i, G [N, P] with rows
g_i, K = G G' [N, N], k_q = G q [N], lambda the damping.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
ADAM_EPSILON = 1e-8
# Below this 1 - p, a row is fitted so well that its margin's gradient is noise over noise.
LEAST_DOUBT = 1e-6


def grad_dot(G: ArrayLike, q: ArrayLike) -> Array:
    """q . g_i: change of the target's loss per unit of lr * steps / n when row i is left out."""
    return np.asarray(np.asarray(G, float) @ np.asarray(q, float))


def cosines(dots: ArrayLike, norms_N: ArrayLike, q_norm: float) -> Array:
    """dots / (|q| |g_i|); 0 where a gradient is 0."""
    scale = np.asarray(norms_N, float) * q_norm
    dots = np.asarray(dots, float)
    return np.asarray(np.divide(dots, scale, out=np.zeros_like(dots), where=scale > 0))


def grad_cos(G: ArrayLike, q: ArrayLike) -> Array:
    """q . g_i / (|q| |g_i|); a zero gradient scores 0."""
    G, q = np.asarray(G, float), np.asarray(q, float)
    return cosines(G @ q, np.linalg.norm(G, axis=1), float(np.linalg.norm(q)))


def adam_scale(second_moment: ArrayLike, step: int, beta2: float = 0.999) -> Array:
    """1 / (sqrt(vhat) + 1e-8), vhat the bias-corrected second moment; times q, then grad_dot."""
    vhat = np.asarray(second_moment, float) / (1.0 - beta2**step)
    return np.asarray(1.0 / (np.sqrt(vhat) + ADAM_EPSILON))


def datainf(K: ArrayLike, k_q: ArrayLike, damping: float) -> Array:
    """One block: (k_q - K (k_q / (lambda + diag K)) / n) / lambda.

    Equals (1/n) sum_j q' (lambda I + g_j g_j')^-1 g_i, an average of inverses. Blocks are summed.
    Source: DataInf, in the Gram form of the brief, 2.4. K [N, N]; k_q [N] or [N, Q].
    """
    K, k_q = np.asarray(K, float), np.asarray(k_q, float)
    shrunk = (k_q.T / (damping + np.diag(K))).T
    return np.asarray((k_q - K @ shrunk / len(K)) / damping)


def fisher_if(K: ArrayLike, k_q: ArrayLike, damping: float) -> Array:
    """q' (lambda I + G'G/n)^-1 g_i = (k_q - K (n lambda I + K)^-1 k_q) / lambda (Woodbury)."""
    K, k_q = np.asarray(K, float), np.asarray(k_q, float)
    solved = np.linalg.solve(len(K) * damping * np.eye(len(K)) + K, k_q)
    return np.asarray((k_q - K @ solved) / damping)


def generalised_influence(
    H: ArrayLike, damping: float, g_i: ArrayLike, H_i: ArrayLike, shift: ArrayLike
) -> Array:
    """(H + lambda I)^-1 (g_i + H_i shift): how the trained point moves as row i leaves (Prop. 1).

    H [P, P] and H_i: Hessians of the mean loss and of row i's. shift: the point further training on
    all rows would reach, -(H + lambda I)^-1 grad R; 0 at a stationary point, where this is the
    classical influence. Neither needs to be convex. Dense, so for small P.
    """
    H = np.asarray(H, float)
    moved = np.asarray(g_i, float) + np.asarray(H_i, float) @ np.asarray(shift, float)
    return np.asarray(np.linalg.solve(H + damping * np.eye(len(H)), moved))


def trak(Phi: ArrayLike, phi_q: ArrayLike, p_N: ArrayLike) -> Array:
    """phi_q' (Phi'Phi)^-1 phi_i (1 - p_i): TRAK with one model. Phi [N, k] with rows phi_i.

    With fewer rows than columns the inverse is the pseudo-inverse.
    """
    Phi, phi_q = np.asarray(Phi, float), np.asarray(phi_q, float)
    solved = Phi @ (np.linalg.pinv(Phi.T @ Phi, hermitian=True) @ phi_q)
    return np.asarray(((1.0 - np.asarray(p_N, float)) * solved.T).T)


def trak_from_gram(K: ArrayLike, k_q: ArrayLike, losses_N: ArrayLike, losses_Q: ArrayLike) -> Array:
    """TRAK from inner products of loss gradients.

    With p = exp(-L), the margin is log(p/(1-p)) and its gradient -g / (1-p), so that Phi = -G/(1-p)
    and Phi (Phi'Phi)^+ phi_q = M^+ m_q with M = Phi Phi'. K [N, N], k_q [N, Q]; returns [N, Q].
    """
    K, k_q = np.asarray(K, float), np.asarray(k_q, float)
    doubt_N = np.maximum(-np.expm1(-np.asarray(losses_N, float)), LEAST_DOUBT)
    doubt_Q = np.maximum(-np.expm1(-np.asarray(losses_Q, float)), LEAST_DOUBT)
    M = K / np.outer(doubt_N, doubt_N)
    solved = np.linalg.pinv(M, rcond=1e-10, hermitian=True) @ (k_q / np.outer(doubt_N, doubt_Q))
    return np.asarray(solved * doubt_N[:, None])
