#pragma once

#include "../../cpu/openvino_op.h"

namespace redraft {

class PerturbedTopK : public Operator {
  public:
    OPENVINO_OP("PerturbedTopK", "redraft", ov::op::Op);
    using Operator::Operator;

    void validate_and_infer_types() override {
        OPENVINO_ASSERT(get_input_size() == kInputs, get_friendly_name(), " has ", get_input_size(),
                        " inputs: expected values, ids, seeds, positions, temperature, top_k, top_p and sharpness");
        const ov::element::Type f32 = ov::element::f32, i32 = ov::element::i32;
        const ov::element::Type types[kInputs] = {f32, i32, i32, i32, f32, i32, f32, f32};
        const int64_t ranks[kInputs] = {2, 2, 2, 1, 1, 1, 1, 1};
        for (std::size_t i = 0; i < kInputs; ++i) {
            expect_type(this, i, types[i]);
            OPENVINO_ASSERT(get_input_partial_shape(i).rank() == ranks[i], get_friendly_name(), ": input ", i,
                            " has shape ", get_input_partial_shape(i), ": expected ", ranks[i], " dimensions");
        }
        const ov::PartialShape shape{get_input_partial_shape(0)[0], k_};
        set_output_type(0, f32, shape);
        set_output_type(1, i32, shape);
    }
    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        auto copy = std::make_shared<PerturbedTopK>(*this);
        copy->set_arguments(inputs);
        copy->validate_and_infer_types();
        return copy;
    }
    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("level", level_);
        visitor.on_attribute("k", k_);
        return true;
    }
    void run(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        const ov::Shape values = inputs[0].get_shape();
        for (ov::Tensor& output : outputs) output.set_shape({values[0], static_cast<std::size_t>(k_)});
        PerturbedTopKArgs args{};
        args.values = inputs[0].data<const float>();
        args.ids = inputs[1].data<const int32_t>();
        args.rows = static_cast<int64_t>(values[0]);
        args.m = static_cast<int64_t>(values[1]);
        args.sequences = static_cast<int64_t>(inputs[2].get_shape()[0]);
        args.seeds = inputs[2].data<const int32_t>();
        args.positions = inputs[3].data<const int32_t>();
        args.temperature = inputs[4].data<const float>();
        args.top_k = inputs[5].data<const int32_t>();
        args.top_p = inputs[6].data<const float>();
        args.sharpness = inputs[7].data<const float>();
        args.level = level_;
        args.k = k_;
        args.next_values = outputs[0].data<float>();
        args.next_ids = outputs[1].data<int32_t>();
        run_kernel(args);
    }

  private:
    static constexpr std::size_t kInputs = 8;

    int64_t level_ = 0, k_ = 0;
};

}  // namespace redraft
