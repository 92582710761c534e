// The forms of weights in blocks, which blocks.py has too, and their sizes; README.md says what they are.
#pragma once

#include "../../cpu/kernels.h"

namespace redraft {

constexpr int64_t kBlockGroup = 32;  // features whose codes lie together, and whose activations share a scale
constexpr int64_t kHalfPanel = 16;   // weight rows that are stored and multiplied together

// Integers that multiply a span's scale (and minimum): none, for each group, or for each half of one.
enum class ScaleSteps { none, group, half };

struct BlockForm {
    int bits;       // of a code
    int zero;       // what is subtracted from codes
    bool minimum;   // whether one is added
    bool zeros;     // whether zeros are stored, and scales float32
    ScaleSteps steps;
    int64_t span;   // features that all floats repeat after; 0: the segment's span
};

constexpr const char* kBlockFormNames[] = {"q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k", "i4", "i8"};
constexpr BlockForm kBlockForms[] = {
    {4, 8, false, false, ScaleSteps::none, 32},    {4, 0, true, false, ScaleSteps::none, 32},
    {5, 16, false, false, ScaleSteps::none, 32},   {5, 0, true, false, ScaleSteps::none, 32},
    {8, 128, false, false, ScaleSteps::none, 32},  {4, 0, true, false, ScaleSteps::group, 256},
    {5, 0, true, false, ScaleSteps::group, 256},   {6, 32, false, false, ScaleSteps::half, 256},
    {4, 0, false, true, ScaleSteps::none, 0},      {8, 0, false, true, ScaleSteps::none, 0},
};
constexpr int kBlockFormCount = sizeof(kBlockForms) / sizeof(*kBlockForms);

// Bytes of a half-panel: of a span's floats, of a group's integer steps, and of a group.
constexpr int64_t span_bytes(const BlockForm& f) {
    return kHalfPanel * (f.zeros ? 5 : f.minimum ? 4 : 2);
}
constexpr int64_t step_bytes(const BlockForm& f) { return f.steps == ScaleSteps::none ? 0 : kHalfPanel * 2; }
constexpr int64_t group_bytes(const BlockForm& f) { return step_bytes(f) + kHalfPanel * kBlockGroup * f.bits / 8; }

inline int64_t block_groups(int64_t in_features) { return (in_features + kBlockGroup - 1) / kBlockGroup; }
inline int64_t span_groups(const BlockSegment& s) {
    const int64_t span = kBlockForms[s.form].span;
    return (span ? span : s.span) / kBlockGroup;
}
inline int64_t half_panels(int64_t rows) { return (rows + kHalfPanel - 1) / kHalfPanel; }
inline int64_t half_panel_bytes(const BlockSegment& s, int64_t in_features) {
    const BlockForm& f = kBlockForms[s.form];
    const int64_t groups = block_groups(in_features), spans = (groups + span_groups(s) - 1) / span_groups(s);
    return spans * span_bytes(f) + groups * group_bytes(f);
}

// Where a half-panel lies, numbered through all segments.
struct HalfPanel {
    const BlockSegment* segment;  // null behind the last
    const char* data;
    int64_t bytes;
};
inline HalfPanel find_half_panel(const BlockSegment* segments, int64_t count, const void* weight, int64_t in_features,
                                 int64_t index) {
    const char* data = static_cast<const char*>(weight);
    for (const BlockSegment* s = segments; s < segments + count; ++s) {
        const int64_t bytes = half_panel_bytes(*s, in_features), here = half_panels(s->rows);
        if (index < here) return {s, data + index * bytes, bytes};
        index -= here;
        data += here * bytes;
    }
    return {nullptr, data, 0};
}

}  // namespace redraft
