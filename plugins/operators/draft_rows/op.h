#pragma once

#include <algorithm>

#include "../../cpu/openvino_op.h"

namespace redraft {

class PairRows : public Operator {
  public:
    OPENVINO_OP("PairRows", "redraft", ov::op::Op);
    using Operator::Operator;

    void validate_and_infer_types() override {
        OPENVINO_ASSERT(get_input_size() == 3, get_friendly_name(), " has ", get_input_size(),
                        " inputs: expected tokens, row_offsets and cache_lengths");
        for (std::size_t i = 0; i < 3; ++i) expect_type(this, i, ov::element::i32);
        for (std::size_t i = 0; i < 5; ++i) set_output_type(i, ov::element::i32, get_input_partial_shape(rows_input(i)));
    }
    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        auto copy = std::make_shared<PairRows>(*this);
        copy->set_arguments(inputs);
        copy->validate_and_infer_types();
        return copy;
    }
    bool visit_attributes(ov::AttributeVisitor&) override { return true; }
    int64_t rows_input(std::size_t output) const override { return output == 0 ? 0 : 2; }
    void run(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        const std::size_t pairs = inputs[0].get_size(), batch = inputs[2].get_size();
        const int32_t *tokens = inputs[0].data<const int32_t>(), *offsets = inputs[1].data<const int32_t>(),
                      *lengths = inputs[2].data<const int32_t>();
        OPENVINO_ASSERT(inputs[1].get_size() == batch + 1, "row_offsets has ", inputs[1].get_size(), " elements for ",
                        batch, " sequences");
        OPENVINO_ASSERT(offsets[0] == 0 && offsets[batch] == static_cast<int32_t>(pairs), "row_offsets go from ",
                        offsets[0], " to ", offsets[batch], ": expected 0 to ", pairs, ", the number of pairs");
        for (std::size_t i = 0; i < 5; ++i) outputs[i].set_shape({i ? batch : pairs});
        int32_t* to[5];
        for (std::size_t i = 0; i < 5; ++i) to[i] = outputs[i].data<int32_t>();
        for (std::size_t b = 0; b < batch; ++b) {
            const int32_t first = offsets[b], end = offsets[b + 1];
            OPENVINO_ASSERT(first < end, "sequence ", b, " has ", end - first, " pairs: expected at least 1");
            for (int32_t row = first; row < end; ++row) to[0][row] = lengths[b] + row - first;
            to[1][b] = end - 1;
            to[2][b] = lengths[b] + end - first;
            to[3][b] = tokens[end - 1];
            to[4][b] = static_cast<int32_t>(b);
        }
    }
};

class DraftRows : public Operator {
  public:
    OPENVINO_OP("DraftRows", "redraft", ov::op::Op);
    using Operator::Operator;

    void validate_and_infer_types() override {
        OPENVINO_ASSERT(get_input_size() == (grows() ? 3u : 1u), get_friendly_name(), " has ", get_input_size(),
                        " inputs: expected contexts and, behind the first level of a tree, origins and tree_mask");
        OPENVINO_ASSERT(level_ >= 1 && first_ >= 0 && width_ >= 1 && (!words_ || first_ + width_ <= 32 * words_),
                        get_friendly_name(), " places ", width_, " nodes behind ", first_, " at level ", level_, " in ",
                        words_, " mask words");
        for (std::size_t i = 0; i < get_input_size(); ++i) expect_type(this, i, ov::element::i32);
        const ov::PartialShape& contexts = get_input_partial_shape(0);
        const ov::Dimension batch = contexts.rank().is_static() ? contexts[0] : ov::Dimension::dynamic();
        const ov::PartialShape shapes[] = {{batch * width_}, {batch + 1}, {batch * width_, words_}, {batch}};
        for (std::size_t i = 0; i < 4; ++i) set_output_type(i, ov::element::i32, shapes[i]);
    }
    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        auto copy = std::make_shared<DraftRows>(*this);
        copy->set_arguments(inputs);
        copy->validate_and_infer_types();
        return copy;
    }
    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("level", level_);
        visitor.on_attribute("first", first_);
        visitor.on_attribute("width", width_);
        visitor.on_attribute("words", words_);
        return true;
    }
    int64_t rows_input(std::size_t output) const override { return output == 3 ? 0 : kUnknownRows; }
    void run(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        const std::size_t batch = inputs[0].get_size(), width = width_, nodes = batch * width, words = words_;
        const int32_t* contexts = inputs[0].data<const int32_t>();
        const ov::Shape shapes[] = {{nodes}, {batch + 1}, {nodes, words}, {batch}};
        for (std::size_t i = 0; i < 4; ++i) outputs[i].set_shape(shapes[i]);
        int32_t *positions = outputs[0].data<int32_t>(), *offsets = outputs[1].data<int32_t>(),
                *mask = outputs[2].data<int32_t>(), *starts = outputs[3].data<int32_t>();
        for (std::size_t b = 0; b <= batch; ++b) offsets[b] = static_cast<int32_t>(b * width);
        for (std::size_t b = 0; b < batch; ++b) {
            starts[b] = static_cast<int32_t>(contexts[b] + first_);
            std::fill_n(positions + b * width, width, static_cast<int32_t>(contexts[b] + level_ - 1));
        }
        if (!words) return;
        std::fill_n(mask, nodes * words, 0);
        for (std::size_t n = 0; n < nodes; ++n) {
            if (grows()) {
                const ov::Shape& before = inputs[2].get_shape();
                OPENVINO_ASSERT(inputs[1].get_size() == nodes && before[1] <= words, "there are ", inputs[1].get_size(),
                                " origins and ", before[1], " mask words: expected ", nodes, " and at most ", words);
                const int32_t origin = inputs[1].data<const int32_t>()[n];
                OPENVINO_ASSERT(origin >= 0 && origin < static_cast<int32_t>(before[0]), "origin ", origin, " of node ",
                                n, ": expected one of ", before[0], " rows");
                std::copy_n(inputs[2].data<const int32_t>() + origin * before[1], before[1], mask + n * words);
            }
            const std::size_t bit = first_ + n % width;
            mask[n * words + bit / 32] |= static_cast<int32_t>(1u << bit % 32);
        }
    }

  private:
    bool grows() const { return words_ && level_ > 1; }
    int64_t level_ = 1, first_ = 0, width_ = 1, words_ = 0;
};

}  // namespace redraft
