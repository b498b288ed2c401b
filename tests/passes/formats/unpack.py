"""Quantized checkpoint formats by the letter: one number at a time, from the formats' descriptions.

Nothing of optimc is imported here. What optimc writes is read back with these functions, and what they write is read
by optimc. Layers are given as plain numbers: codes [N][C], scales and zero points [N][g].
"""

import numpy as np

MASK32 = 0xFFFFFFFF


def words_of(codes, bits):
    """One stream of bits, least significant first, cut into 32-bit words."""
    stream = 0
    for position, code in enumerate(codes):
        stream |= int(code) << (position * bits)
    count = -(-len(codes) * bits // 32)
    return [(stream >> (32 * number)) & MASK32 for number in range(count)]


def codes_of(words, bits, count):
    stream = 0
    for number, word in enumerate(words):
        stream |= (int(word) & MASK32) << (32 * number)
    return [(stream >> (position * bits)) & (2**bits - 1) for position in range(count)]


def signed(words):
    return np.array(words, np.uint32).view(np.int32)


# ---- GPTQ


def pack_gptq(codes, scales, zeros, bits, g_idx=None, *, version=1):
    """Codes in the source's column order; zeros [N][g]. Version 1 stores each zero point less one, in its own bits."""
    outputs, columns = np.shape(codes)
    groups = np.shape(scales)[1]
    qweight = np.zeros((-(-columns * bits // 32), outputs), np.int32)
    for n in range(outputs):
        qweight[:, n] = signed(words_of(codes[n], bits))
    qzeros = []
    for g in range(groups):
        stored = [(int(zeros[n][g]) - (1 if version == 1 else 0)) % 2**bits for n in range(outputs)]
        qzeros.append(signed(words_of(stored, bits)))
    tensors = {"qweight": qweight, "qzeros": np.array(qzeros), "scales": np.asarray(scales, np.float16).T.copy()}
    if g_idx is not None:
        tensors["g_idx"] = np.asarray(g_idx, np.int32)
    return tensors


def unpack_gptq(tensors, bits, columns, *, version=1):
    """The weight [N, C] as float32."""
    qweight, qzeros, scales = tensors["qweight"], tensors["qzeros"], tensors["scales"].astype(np.float32)
    groups, outputs = scales.shape
    group = -(-columns // groups)
    g_idx = tensors.get("g_idx", [c // group for c in range(columns)])
    zeros = [codes_of(qzeros[g], bits, outputs) for g in range(groups)]
    weight = np.zeros((outputs, columns), np.float32)
    for n in range(outputs):
        codes = codes_of(qweight[:, n], bits, columns)
        for c in range(columns):
            g = int(g_idx[c])
            zero = (zeros[g][n] + (1 if version == 1 else 0)) % 2**bits
            weight[n, c] = np.float32(codes[c] - zero) * scales[g, n]
    return weight


# ---- AWQ: eight 4-bit codes a word, nibble i from the least significant holding code ORDER[i]

ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def awq_words(codes):
    words = []
    for start in range(0, len(codes), 8):
        word = 0
        for nibble in range(8):
            word |= int(codes[start + ORDER[nibble]]) << (4 * nibble)
        words.append(word)
    return words


def awq_codes(words):
    codes = []
    for word in words:
        eight = [0] * 8
        for nibble in range(8):
            eight[ORDER[nibble]] = ((int(word) & MASK32) >> (4 * nibble)) & 15
        codes += eight
    return codes


def pack_awq(codes, scales, zeros):
    codes, scales, zeros = np.asarray(codes), np.asarray(scales), np.asarray(zeros)
    return {
        "qweight": np.array([signed(awq_words(codes[:, c])) for c in range(codes.shape[1])]),
        "qzeros": np.array([signed(awq_words(zeros[:, g])) for g in range(scales.shape[1])]),
        "scales": scales.T.astype(np.float16).copy(),
    }


def unpack_awq(tensors, columns):
    scales = tensors["scales"].astype(np.float32)
    groups, outputs = scales.shape
    group = -(-columns // groups)
    weight = np.zeros((outputs, columns), np.float32)
    for c in range(columns):
        codes, zeros = awq_codes(tensors["qweight"][c]), awq_codes(tensors["qzeros"][c // group])
        for n in range(outputs):
            weight[n, c] = np.float32(codes[n] - zeros[n]) * scales[c // group, n]
    return weight


# ---- compressed-tensors


def pack_compressed(codes, scales, zeros, bits):
    """Unsigned codes (the signed value plus half the range); zeros [N][g] the same way, or None."""
    codes, scales = np.asarray(codes), np.asarray(scales)
    tensors = {
        "weight_packed": np.array([signed(words_of(row, bits)) for row in codes]),
        "weight_scale": scales.astype(np.float16),
        "weight_shape": np.array(codes.shape, np.int64),
    }
    if zeros is not None:
        zeros = np.asarray(zeros)
        columns = [signed(words_of(zeros[:, g], bits)) for g in range(zeros.shape[1])]
        tensors["weight_zero_point"] = np.array(columns).T.copy()
    return tensors


def unpack_compressed(tensors, bits):
    outputs, columns = (int(size) for size in tensors["weight_shape"])
    scales = tensors["weight_scale"].astype(np.float32)
    groups = scales.shape[1]
    group = -(-columns // groups)
    half = 2 ** (bits - 1)
    zeros = np.full((outputs, groups), half)
    if "weight_zero_point" in tensors:
        for g in range(groups):
            zeros[:, g] = codes_of(tensors["weight_zero_point"][:, g], bits, outputs)
    weight = np.zeros((outputs, columns), np.float32)
    for n in range(outputs):
        codes = codes_of(tensors["weight_packed"][n], bits, columns)
        for c in range(columns):
            weight[n, c] = np.float32(codes[c] - zeros[n][c // group]) * scales[n, c // group]
    return weight


def unpack_int8(tensors):
    scales = tensors["weight_scale"].astype(np.float32)
    return tensors["weight"].astype(np.float32) * scales.reshape(-1, 1)
