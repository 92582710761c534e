#pragma once

#include "../../cpu/openvino_op.h"

namespace redraft {

class ReorderFeatures : public Operator {
  public:
    OPENVINO_OP("ReorderFeatures", "redraft.cpu", ov::op::Op);
    using Operator::Operator;

    void validate_and_infer_types() override {
        OPENVINO_ASSERT(get_input_size() == 2, get_friendly_name(), " has ", get_input_size(), " inputs: expected 2");
        expect_type(this, 0, ov::element::f32);
        expect_type(this, 1, ov::element::i32);
        OPENVINO_ASSERT(get_input_partial_shape(0).rank() == 2, get_friendly_name(), ": x has shape ",
                        get_input_partial_shape(0), ": expected [rows, features]");
        set_output_type(0, ov::element::f32, get_input_partial_shape(0));
    }
    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        auto copy = std::make_shared<ReorderFeatures>(*this);
        copy->set_arguments(inputs);
        copy->validate_and_infer_types();
        return copy;
    }
    bool visit_attributes(ov::AttributeVisitor&) override { return true; }
    void run(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        const ov::Shape shape = inputs[0].get_shape();
        OPENVINO_ASSERT(inputs[1].get_size() == shape[1], "order has ", inputs[1].get_size(), " elements: expected ",
                        shape[1]);
        outputs[0].set_shape(shape);
        run_kernel(ReorderFeaturesArgs{inputs[0].data<const float>(), static_cast<int64_t>(shape[0]),
                                       static_cast<int64_t>(shape[1]), inputs[1].data<const int32_t>(),
                                       outputs[0].data<float>()});
    }
};

}  // namespace redraft
