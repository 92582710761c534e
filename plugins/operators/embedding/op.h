#pragma once

#include "../../cpu/openvino_op.h"

namespace redraft {

class Embedding : public Operator {
  public:
    OPENVINO_OP("Embedding", "redraft.cpu", ov::op::Op);
    using Operator::Operator;

    void validate_and_infer_types() override {
        stored_ = WeightStorage(dtype_);
        optional_ = OptionalInputs(inputs_, 2);
        OPENVINO_ASSERT(get_input_size() == optional_.end(), get_friendly_name(), " has ", get_input_size(),
                        " inputs: attribute inputs='", inputs_, "' says ", optional_.end());
        expect_type(this, 0, ov::element::i32);
        expect_type(this, 1, ov::element::u8);
        for (std::size_t i = 2; i < optional_.end(); ++i) expect_type(this, i, ov::element::f32);
        expect_elements(this, 1, stored_.bytes(in_features_, out_features_, Activation::none));
        const ov::PartialShape& ids = get_input_partial_shape(0);
        const ov::Dimension rows = ids.rank().is_static() ? ids[0] : ov::Dimension::dynamic();
        set_output_type(0, ov::element::f32, {rows, in_features_});
    }
    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        auto copy = std::make_shared<Embedding>(*this);
        copy->set_arguments(inputs);
        copy->validate_and_infer_types();
        return copy;
    }
    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("in_features", in_features_);
        visitor.on_attribute("out_features", out_features_);
        visitor.on_attribute("dtype", dtype_);
        visitor.on_attribute("clamped", clamped_);
        visitor.on_attribute("factor", factor_);
        visitor.on_attribute("inputs", inputs_);
        return true;
    }
    void run(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        const std::size_t rows = inputs[0].get_shape()[0];
        outputs[0].set_shape({rows, static_cast<std::size_t>(in_features_)});
        const EmbeddingArgs args{inputs[0].data<const int32_t>(),
                                 static_cast<int64_t>(rows),
                                 inputs[1].data(),
                                 in_features_,
                                 out_features_,
                                 stored_.dtype,
                                 stored_.data(),
                                 stored_.count(),
                                 factor_,
                                 clamped_,
                                 optional_.data<float>(inputs, kResidual, rows * in_features_),
                                 outputs[0].data<float>()};
        run_kernel(args);
    }

  private:
    int64_t in_features_ = 0, out_features_ = 0, clamped_ = 0;
    float factor_ = 1.0f;
    std::string dtype_ = "fp32", inputs_;
    OptionalInputs optional_;  // of inputs_, and
    WeightStorage stored_;            // of dtype_, parsed when the node is validated
};

}  // namespace redraft
