#pragma once

#include <algorithm>

#include "../../cpu/openvino_op.h"

namespace redraft {

// Attributes and inputs that Linear and LinearTopK share.
class ProjectionOp : public Operator {
  public:
    using Operator::Operator;

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("in_features", in_features_);
        visitor.on_attribute("out_features", out_features_);
        visitor.on_attribute("dtype", dtype_);
        visitor.on_attribute("norm_eps", norm_eps_);
        visitor.on_attribute("inputs", inputs_);
        return true;
    }
    int64_t rows_input(std::size_t) const override { return std::max<int64_t>(optional_.find(kRows), 0); }

  protected:
    // Checks inputs; returns the number of rows.
    ov::Dimension check_projection(Activation activation) {
        stored_ = WeightStorage(dtype_);
        optional_ = OptionalInputs(inputs_, 2);
        OPENVINO_ASSERT(optional_.find(kNormBias) < 0 || optional_.find(kNorm) >= 0, get_friendly_name(),
                        ": the input norm_bias comes with norm only");
        OPENVINO_ASSERT(get_input_size() == optional_.end(), get_friendly_name(), " has ", get_input_size(),
                        " inputs: attribute inputs='", inputs_, "' says ", optional_.end());
        expect_type(this, 0, ov::element::f32);
        expect_type(this, 1, ov::element::u8);
        expect_elements(this, 1, stored_.bytes(in_features_, out_features_, activation));
        const int64_t weight_rows = is_gated(activation) ? 2 * out_features_ : out_features_;
        const std::pair<Optional, int64_t> vectors[] = {
            {kBias, weight_rows},
            {kNorm, in_features_},
            {kNormBias, in_features_},
            {kIds, out_features_}};
        for (const auto& [which, elements] : vectors)
            if (optional_.find(which) >= 0) expect_elements(this, optional_.find(which), elements);
        for (std::size_t i = 0; i < kOptionals; ++i) {
            const int64_t input = optional_.find(static_cast<Optional>(i));
            if (input >= 0) expect_type(this, input, i < kRows ? ov::element::f32 : ov::element::i32);
        }
        const ov::PartialShape& x = get_input_partial_shape(0);
        OPENVINO_ASSERT(x.rank().compatible(2) && (x.rank().is_dynamic() || x[1].compatible(in_features_)),
                        get_friendly_name(), ": x has shape ", x, ": expected [rows, ", in_features_, "]");
        const ov::PartialShape& rows = get_input_partial_shape(rows_input(0));
        return rows.rank().is_static() ? rows[0] : ov::Dimension::dynamic();
    }

    Projection projection(const ov::TensorVector& inputs) const {
        return {inputs[0].data<const float>(),
                static_cast<int64_t>(inputs[0].get_shape()[0]),
                optional_.data<int32_t>(inputs, kRows),
                static_cast<int64_t>(inputs[rows_input(0)].get_shape()[0]),
                inputs[1].data(),
                optional_.data<float>(inputs, kBias),
                optional_.data<float>(inputs, kNorm),
                optional_.data<float>(inputs, kNormBias),
                norm_eps_,
                in_features_,
                out_features_,
                stored_.dtype,
                stored_.data(),
                stored_.count()};
    }

    int64_t in_features_ = 0, out_features_ = 0;
    std::string dtype_ = "fp32", inputs_;
    float norm_eps_ = 1e-5f;
    OptionalInputs optional_;  // of inputs_, and
    WeightStorage stored_;            // of dtype_, parsed when the node is validated
};

}  // namespace redraft
