#pragma once

#include "../../cpu/openvino_op.h"

namespace redraft {

class Embedding : public Operator {
  public:
    OPENVINO_OP("Embedding", "redraft.cpu", ov::op::Op);
    using Operator::Operator;

    void validate_and_infer_types() override {
        type_ = parse_dtype(dtype_);
        OPENVINO_ASSERT(get_input_size() == (has_scale(type_) ? 3u : 2u), get_friendly_name(), " has ",
                        get_input_size(), " inputs: expected ids, packed_weight and, with int8 weights, scale");
        expect_type(this, 0, ov::element::i32);
        expect_type(this, 1, ov::element::u8);
        expect_elements(this, 1, packed_bytes(in_features_, out_features_, type_, Activation::none));
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
        return true;
    }
    void run(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        const std::size_t rows = inputs[0].get_shape()[0];
        outputs[0].set_shape({rows, static_cast<std::size_t>(in_features_)});
        const EmbeddingArgs args{inputs[0].data<const int32_t>(),
                                 static_cast<int64_t>(rows),
                                 inputs[1].data(),
                                 inputs.size() > 2 ? inputs[2].data<const float>() : nullptr,
                                 in_features_,
                                 out_features_,
                                 type_,
                                 outputs[0].data<float>()};
        run_kernel(args);
    }

  private:
    int64_t in_features_ = 0, out_features_ = 0;
    std::string dtype_ = "fp32";
    DType type_{};  // of dtype_, parsed when the node is validated
};

}  // namespace redraft
