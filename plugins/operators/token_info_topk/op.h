#pragma once

#include "../../cpu/openvino_op.h"

namespace redraft {

class TokenInfoTopK : public Operator {
  public:
    OPENVINO_OP("TokenInfoTopK", "redraft", ov::op::Op);
    using Operator::Operator;

    void validate_and_infer_types() override {
        const std::size_t count = get_input_size();
        OPENVINO_ASSERT(count == 4 || count == 5 || count == 7, get_friendly_name(), " has ", count,
                        " inputs: expected logits, sequences, tokens, ids and, with token info, its rows, or row_of, "
                        "table and scales");
        const ov::element::Type f32 = ov::element::f32, i32 = ov::element::i32;
        const bool bf16 = count == 7 && get_input_element_type(5) == ov::element::bf16;
        const ov::element::Type table = bf16 ? ov::element::bf16 : ov::element::i8;
        const ov::element::Type types[] = {f32, i32, i32, i32, count == 5 ? f32 : i32, table, f32};
        for (std::size_t i = 0; i < count; ++i) expect_type(this, i, types[i]);
        const ov::PartialShape& nodes = get_input_partial_shape(1);
        const ov::PartialShape shape{nodes.rank().is_static() ? nodes[0] : ov::Dimension::dynamic(), k_};
        set_output_type(0, f32, shape);
        set_output_type(1, i32, shape);
    }
    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        auto copy = std::make_shared<TokenInfoTopK>(*this);
        copy->set_arguments(inputs);
        copy->validate_and_infer_types();
        return copy;
    }
    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("k", k_);
        visitor.on_attribute("level", level_);
        visitor.on_attribute("levels", levels_);
        return true;
    }
    int64_t rows_input(std::size_t) const override { return 1; }
    void run(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        const std::size_t rows = inputs[1].get_size();
        OPENVINO_ASSERT(inputs[2].get_size() == rows, "there are ", inputs[2].get_size(), " tokens for ", rows, " nodes");
        for (ov::Tensor& output : outputs) output.set_shape({rows, static_cast<std::size_t>(k_)});
        TokenInfoTopKArgs args{};
        args.logits = inputs[0].data<const float>();
        args.logit_rows = static_cast<int64_t>(inputs[0].get_shape()[0]);
        args.columns = static_cast<int64_t>(inputs[0].get_shape()[1]);
        args.level = level_;
        args.levels = levels_;
        args.sequences = inputs[1].data<const int32_t>();
        args.tokens = inputs[2].data<const int32_t>();
        args.rows = static_cast<int64_t>(rows);
        OPENVINO_ASSERT(static_cast<int64_t>(inputs[3].get_size()) == args.columns, "there are ", inputs[3].get_size(),
                        " ids for ", args.columns, " columns");
        args.ids = inputs[3].data<const int32_t>();
        if (inputs.size() > 4) {
            const ov::Tensor& info = inputs.size() == 7 ? inputs[5] : inputs[4];
            args.table = info.data();
            args.dtype = info.get_element_type() == ov::element::f32    ? DType::fp32
                         : info.get_element_type() == ov::element::bf16 ? DType::bf16
                                                                        : DType::int8;
            args.entries = static_cast<int64_t>(info.get_shape()[0]);
            args.kept = static_cast<int64_t>(info.get_shape()[1]);
        }
        if (inputs.size() == 7) {
            args.row_of = inputs[4].data<const int32_t>();
            args.vocabulary = static_cast<int64_t>(inputs[4].get_size());
            args.scales = inputs[6].data<const float>();
        }
        args.k = k_;
        args.values = outputs[0].data<float>();
        args.indices = outputs[1].data<int32_t>();
        run_kernel(args);
    }

  private:
    int64_t k_ = 0, level_ = 0, levels_ = 0;
};

}  // namespace redraft
